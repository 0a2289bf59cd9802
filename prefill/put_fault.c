/* The fault points of puts, in a drill build only: see base/fault.h.
 *
 * A put that is delayed keeps its parcel waiting. One that is duplicated is put a second time
 * later, when its slots may hold another transfer's bytes; one that is reordered is told to the
 * decode node before it is put. Such a late put belongs to nobody: it is what a peer does that
 * writes on after its time. A corrupt one takes its bytes from eight bytes beside the right place.
 */
#include <string.h>

#include "base/fault.h"
#include "base/list.h"
#include "base/mem.h"
#include "prefill/handoff_internal.h"

struct late_put {
    struct list link;
    struct loop_timer *timer;
    struct put_peer *peer; /* NULL: lost meanwhile */
    struct parcel *parcel; /* NULL: nobody waits */
    bool tell_first;
    uint32_t ms;
    put_done_fn done;
    struct region *source;
    uint32_t n;
    struct put_run puts[MAX_PARCEL_PAGES];
};

static struct list all = {&all, &all};

static void late_free(struct late_put *late)
{
    list_remove(&late->link);
    loop_timer_free(late->timer);
    mem_free(late);
}

static void nobody(void *cookie, const struct put_result *result)
{
}

static void on_late(void *cookie)
{
    struct late_put *late = cookie;
    struct parcel *parcel = late->parcel;
    struct put_result result = {.status = STATUS_OK};
    struct error err;
    if (late->tell_first && late->peer && parcel) {
        late->parcel = NULL;
        loop_timer_arm(late->timer, late->ms * NS_PER_MS);
        late->done(parcel, &result);
        return;
    }
    if (!late->peer || (parcel && parcel->run->state == RUN_ENDING)) {
        result.status = STATUS_CANCELLED;
    } else if (parcel) {
        result.status = put_submit(late->peer, late->source, late->puts, late->n, late->done,
                                   parcel, &parcel->put, &err);
    } else if (put_submit(late->peer, late->source, late->puts, late->n, nobody, NULL, NULL,
                          &err)) {
        result.status = STATUS_PEER_LOST;
    }
    put_done_fn done = late->done;
    late_free(late);
    if (parcel && result.status) {
        done(parcel, &result);
    }
}

static void late_add(struct parcel *parcel, bool waits, struct region *source,
                     const struct put_run *puts, put_done_fn done, struct fault_hit hit)
{
    struct late_put *late = mem_zalloc(sizeof(*late));
    late->peer = parcel->run->target->peer;
    late->parcel = waits ? parcel : NULL;
    late->tell_first = hit.action == FAULT_REORDER;
    late->ms = hit.ms;
    late->done = done;
    late->source = source;
    late->n = parcel->n_slots;
    memcpy(late->puts, puts, late->n * sizeof(puts[0]));
    late->timer = loop_timer_create(parcel->run->runs->options.loop, on_late, late);
    list_push_back(&all, &late->link);
    loop_timer_arm(late->timer, late->tell_first ? 0 : hit.ms * NS_PER_MS);
}

enum status parcel_put_fault(struct parcel *parcel, struct region *source, struct put_run *puts,
                             put_done_fn done, struct error *err)
{
    struct fault_hit hit = fault_hit(parcel->is_tail ? FAULT_PUT_TAIL : FAULT_PUT_PAGES);
    switch (hit.action) {
    case FAULT_FAIL:
        return error_set(err, STATUS_PEER_LOST, "it failed at a fault point");
    case FAULT_DELAY:
    case FAULT_REORDER:
        late_add(parcel, true, source, puts, done, hit);
        return STATUS_OK;
    case FAULT_DUPLICATE:
        late_add(parcel, false, source, puts, done, hit);
        break;
    case FAULT_CORRUPT:
        puts[0].source_offset += puts[0].source_offset >= 8 ? (uint64_t)-8 : 8;
        break;
    default:
        break;
    }
    return put_submit(parcel->run->target->peer, source, puts, parcel->n_slots, done, parcel,
                      &parcel->put, err);
}

void parcel_put_fault_lost(const struct put_peer *peer)
{
    list_for_each(at, &all)
    {
        struct late_put *late = list_entry(at, struct late_put, link);
        if (!peer || late->peer == peer) {
            late->peer = NULL;
            loop_timer_arm(late->timer, 0);
        }
    }
}

void parcel_put_fault_stop(void)
{
    list_for_each_safe(at, &all)
    {
        late_free(list_entry(at, struct late_put, link));
    }
}
