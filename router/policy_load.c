/*
 * The policy of least predicted wait.
 *
 * The wait of a candidate is what lies before its first token: the prompt tokens queued at the node
 * that would compute the prompt, and this prompt, at the speed which that node measured lately; the
 * way of the last page; and, where decode has no free sequence, its queue at the mean duration of
 * an attempt there. Tokens that this router sent and that the node's last Status can't have seen
 * are added, so that a burst between two Statuses is spread.
 *
 * Local prefill takes its time from everybody who generates on that node, so its prompt counts
 * twice, and a prefill node that is less than LOCAL_BIAS slower is preferred.
 *
 * What failed just now is shunned for a second, what said QUEUE_FULL for 50 ms, if there is
 * anything else. Equal waits go to the node with fewer attempts of ours, then in turn.
 */
#include "router/policy.h"

#include <string.h>

#include "base/mem.h"

enum {
    SEEN_AFTER_MS = 30, /* a Status that came this long after a Start has counted it */
    FULL_MS = 50,       /* a queue that was full is not asked for so long */
    SHUN_MS = 1000,     /* after a failure */
    LOCAL_BIAS_MS = 25,
    TRIED_COST_S = 1000, /* more than any wait: only taken when nothing else is there */
    SHUN_COST_S = 100,
};

#define DEFAULT_TOKENS_PER_S 5000.0
#define DEFAULT_LEG_S 2.0

struct policy_load {
    struct policy policy;
    struct registry *registry;
    enum local_prefill local;
    uint64_t turn;
};

struct candidate {
    struct node *decode, *prefill;
    double cost_s, wait_s;
    uint32_t n_live;
};

static double unseen_tokens(const struct node *node)
{
    return (double)(node->load.unseen_old_tokens + node->load.unseen_new_tokens);
}

static void unseen_add(struct node_load *load, uint32_t n_tokens)
{
    uint64_t now_ns = loop_now_ns();
    if (now_ns - load->unseen_new_since_ns > SEEN_AFTER_MS * NS_PER_MS) {
        load->unseen_old_tokens += load->unseen_new_tokens;
        load->unseen_new_tokens = 0;
        load->unseen_new_since_ns = now_ns;
    }
    load->unseen_new_tokens += n_tokens;
}

/* Tokens a second; of a node that has not measured yet what the others of its role do. */
static double speed_of(struct policy_load *policy, const struct node *node)
{
    double sum = 0;
    unsigned n = 0;
    if (node->prefill_tokens_per_s > 0) {
        return node->prefill_tokens_per_s;
    }
    list_for_each(at, registry_nodes(policy->registry))
    {
        const struct node *other = list_entry(at, struct node, in_registry);
        if (other->role == node->role && other->prefill_tokens_per_s > 0) {
            sum += other->prefill_tokens_per_s;
            n++;
        }
    }
    return n ? sum / n : DEFAULT_TOKENS_PER_S;
}

/* Until decode has a sequence for one more. */
static double batch_wait_s(const struct node *decode, uint32_t n_samples)
{
    const struct node_load *load = &decode->load;
    double leg_s = load->leg_s > 0 ? load->leg_s : DEFAULT_LEG_S;
    /* Ours that run now may be more than the last Status knew. */
    uint32_t n_known = decode->n_queued + decode->n_running;
    uint32_t n_ours = load->n_live > n_known ? load->n_live - n_known : 0;
    uint32_t n_free = decode->sequences_free > n_ours ? decode->sequences_free - n_ours : 0;
    if (decode->n_queued == 0 && n_free >= n_samples) {
        return 0;
    }
    double n_rows = decode->max_sequences ? decode->max_sequences : 1;
    return (decode->n_queued + n_ours + n_samples) * leg_s / n_rows;
}

static const struct node_pair *pair_of(const struct node *decode, const struct node *prefill)
{
    for (size_t i = 0; i < decode->n_pairs; i++) {
        const struct node_pair *pair = &decode->pairs[i];
        if (pair->prefill.incarnation == prefill->ref.incarnation &&
            strcmp(pair->prefill.id, prefill->ref.id) == 0) {
            return pair;
        }
    }
    return NULL;
}

static bool ref_is(const struct node_ref *ref, const struct node *node)
{
    return node ? ref->incarnation == node->ref.incarnation && strcmp(ref->id, node->ref.id) == 0
                : ref->id[0] == '\0';
}

static void candidate_judge(struct policy_load *policy, const struct policy_question *question,
                            const struct node_pair *pair, struct candidate *candidate)
{
    const struct node *decode = candidate->decode, *prefill = candidate->prefill;
    uint64_t now_ns = loop_now_ns();
    double wait_s = batch_wait_s(decode, question->n_samples);
    double bias_s = 0;
    if (prefill) {
        double speed = speed_of(policy, prefill);
        double backlog = (double)prefill->queued_tokens + unseen_tokens(prefill);
        wait_s += (backlog + question->n_ids) / speed + (double)pair->put_cost_ns * 1e-9;
        if (pair->bandwidth_bytes_per_s) {
            wait_s += (double)decode->page_bytes / (double)pair->bandwidth_bytes_per_s;
        }
        bias_s += prefill->load.shunned_until_ns > now_ns ? SHUN_COST_S : 0;
    } else {
        double speed = speed_of(policy, decode);
        double backlog = (double)decode->queued_tokens + unseen_tokens(decode);
        wait_s += (backlog + question->n_ids) / speed;
        if (policy->local == LOCAL_PREFILL_AUTO) {
            bias_s += question->n_ids / speed + LOCAL_BIAS_MS * 1e-3;
        }
    }
    bias_s += decode->load.shunned_until_ns > now_ns ? SHUN_COST_S : 0;
    for (size_t i = 0; i < question->n_tried; i++) {
        bool same_decode = ref_is(&question->tried[i].decode, decode);
        if (same_decode && ref_is(&question->tried[i].prefill, prefill)) {
            bias_s += TRIED_COST_S;
        }
    }
    candidate->wait_s = wait_s;
    candidate->cost_s = wait_s + bias_s;
    candidate->n_live = decode->load.n_live + (prefill ? prefill->load.n_live : 0);
}

/* Whether a beats b; equal within a millisecond is equal. */
static bool is_better(const struct candidate *a, const struct candidate *b)
{
    if (!b->decode) {
        return true;
    }
    double difference_s = a->cost_s - b->cost_s;
    if (difference_s < -1e-3 || difference_s > 1e-3) {
        return difference_s < 0;
    }
    return a->n_live < b->n_live;
}

static bool is_full(const struct policy_question *question, const struct node *decode)
{
    for (size_t i = 0; i < question->n_full; i++) {
        if (ref_is(&question->full[i], decode)) {
            return true;
        }
    }
    return decode->load.full_until_ns > loop_now_ns();
}

static void judge_decode(struct policy_load *policy, const struct policy_question *question,
                         struct node *decode, struct candidate *best)
{
    struct candidate candidate = {.decode = decode};
    if (policy->local != LOCAL_PREFILL_NEVER) {
        candidate_judge(policy, question, NULL, &candidate);
        if (is_better(&candidate, best)) {
            *best = candidate;
        }
    }
    if (policy->local == LOCAL_PREFILL_ONLY) {
        return;
    }
    list_for_each(at, registry_nodes(policy->registry))
    {
        struct node *prefill = list_entry(at, struct node, in_registry);
        const struct node_pair *pair;
        if (!registry_prefill_usable(prefill) || !(pair = pair_of(decode, prefill)) ||
            pair->state != BATON__TO_ROUTER__PAIR__STATE__READY) {
            continue;
        }
        candidate = (struct candidate){.decode = decode, .prefill = prefill};
        candidate_judge(policy, question, pair, &candidate);
        if (is_better(&candidate, best)) {
            *best = candidate;
        }
    }
}

static enum status choose(struct policy *base, const struct policy_question *question,
                          struct policy_choice *ret_choice, uint64_t *ret_wait_ns)
{
    struct policy_load *policy = (struct policy_load *)base;
    struct candidate best = {NULL, NULL, 0, 0, 0};
    struct list *nodes = registry_nodes(policy->registry);
    double full_wait_s = 0;
    size_t n_full = 0, n_usable = 0;
    list_for_each(at, nodes)
    {
        n_usable += registry_node_usable(list_entry(at, struct node, in_registry));
    }
    /* Start at another place each time: among equals, the first one seen wins. */
    size_t skip = n_usable ? policy->turn++ % n_usable : 0;
    for (int round = 0; round < 2; round++) {
        size_t i = 0;
        list_for_each(at, nodes)
        {
            struct node *node = list_entry(at, struct node, in_registry);
            if (!registry_node_usable(node) || (i++ < skip) == (round == 0)) {
                continue;
            }
            if (is_full(question, node)) {
                double wait_s = batch_wait_s(node, question->n_samples);
                full_wait_s = n_full == 0 || wait_s < full_wait_s ? wait_s : full_wait_s;
                n_full++;
                continue;
            }
            judge_decode(policy, question, node, &best);
        }
    }
    if (!best.decode) {
        if (n_full > 0) {
            *ret_wait_ns = (uint64_t)(full_wait_s * 1e9);
        }
        return n_full > 0 ? STATUS_EXHAUSTED : STATUS_NOT_FOUND;
    }
    best.decode->load.n_live++;
    unseen_add(best.prefill ? &best.prefill->load : &best.decode->load, question->n_ids);
    if (best.prefill) {
        best.prefill->load.n_live++;
    }
    *ret_choice = (struct policy_choice){best.decode, best.prefill, (uint64_t)(best.wait_s * 1e9)};
    return STATUS_OK;
}

static void ended(struct policy *policy, struct node *decode, struct node *prefill,
                  enum policy_outcome outcome, uint64_t leg_ns)
{
    uint64_t now_ns = loop_now_ns();
    if (decode) {
        struct node_load *load = &decode->load;
        load->n_live -= load->n_live > 0;
        if (outcome == POLICY_FINISHED) {
            double leg_s = (double)leg_ns * 1e-9;
            load->leg_s = load->leg_s > 0 ? load->leg_s * 0.9 + leg_s * 0.1 : leg_s;
        } else if (outcome == POLICY_QUEUE_FULL) {
            load->full_until_ns = now_ns + FULL_MS * NS_PER_MS;
        } else if (outcome == POLICY_DECODE_FAILED) {
            load->shunned_until_ns = now_ns + SHUN_MS * NS_PER_MS;
        }
    }
    if (prefill) {
        prefill->load.n_live -= prefill->load.n_live > 0;
        if (outcome == POLICY_PAIR_FAILED) {
            prefill->load.shunned_until_ns = now_ns + SHUN_MS * NS_PER_MS;
        }
    }
}

static void status(struct policy *policy, struct node *node)
{
    struct node_load *load = &node->load;
    load->unseen_old_tokens = 0;
    if (loop_now_ns() - load->unseen_new_since_ns > SEEN_AFTER_MS * NS_PER_MS) {
        load->unseen_new_tokens = 0;
    }
}

static void load_free(struct policy *policy)
{
    mem_free(policy);
}

static const struct policy_ops load_ops = {
    .choose = choose,
    .ended = ended,
    .status = status,
    .free = load_free,
};

struct policy *policy_load_create(struct registry *registry, enum local_prefill local)
{
    struct policy_load *policy = mem_zalloc(sizeof(*policy));
    policy->policy.ops = &load_ops;
    policy->registry = registry;
    policy->local = local;
    return &policy->policy;
}
