/* Tokens a second of a checkpoint on the CPU, next to the floors that this machine sets.
 *
 *   bench_cpu MODEL [THREADS [ROUNDS]]
 *
 * Floors, measured in the same run with as many threads: how fast memory as large as the weights is
 * read over and over, and how fast the cores multiply and add from registers. A decode step of b
 * rows must read the dense weights once and the experts that the rows chose (counted as if no two
 * rows chose the same); a token must make two operations a weight that it uses. Attention, index,
 * caches and quantisers come on top and are not in the floor, so the ratio can't reach one.
 *
 * Other work on the machine takes turns with this; so beside the best round's clock on the wall
 * stands what its CPU time would give, were the threads never interrupted.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "base/log.h"
#include "base/loop.h"
#include "base/mem.h"
#include "engine/engine.h"
#include "model/config.h"

enum { CONTEXT = 4096, MAX_ROWS = 16, PROMPT = 256, STEPS = 48, MAX_THREADS = 64 };

static int n_threads = 2, n_rounds = 5;

static double cpu_seconds(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
}

/* ---- floors ---- */

typedef float vec8 __attribute__((vector_size(32)));

struct probe {
    const uint64_t *words;
    size_t n_words;
    uint64_t sum;
    float flops;
};

static void *read_memory(void *arg)
{
    struct probe *probe = arg;
    uint64_t sum[8] = {0};
    for (size_t i = 0; i + 8 <= probe->n_words; i += 8) {
        for (int k = 0; k < 8; k++) {
            sum[k] += probe->words[i + (size_t)k];
        }
    }
    for (int k = 0; k < 8; k++) {
        probe->sum += sum[k];
    }
    return NULL;
}

enum { FMA_LOOPS = 4000000, FMA_CHAINS = 10 };

__attribute__((target("avx2,fma"))) static void *multiply(void *arg)
{
    struct probe *probe = arg;
    vec8 sums[FMA_CHAINS], a, b;
    for (int k = 0; k < 8; k++) {
        a[k] = 1.0f - 1e-7f * (float)k;
        b[k] = 1e-7f;
    }
    memset(sums, 0, sizeof(sums));
    for (int i = 0; i < FMA_LOOPS; i++) {
        for (int k = 0; k < FMA_CHAINS; k++) {
            sums[k] = sums[k] * a + b;
        }
    }
    for (int k = 0; k < FMA_CHAINS; k++) {
        probe->flops += sums[k][k % 8];
    }
    return NULL;
}

static double run_threads(void *(*fn)(void *), struct probe *probes)
{
    pthread_t threads[MAX_THREADS];
    uint64_t begin_ns = loop_now_ns();
    for (int i = 0; i < n_threads; i++) {
        if (pthread_create(&threads[i], NULL, fn, &probes[i]) != 0) {
            abort();
        }
    }
    for (int i = 0; i < n_threads; i++) {
        pthread_join(threads[i], NULL);
    }
    return (double)(loop_now_ns() - begin_ns);
}

static double measure_read(size_t bytes)
{
    struct probe probes[MAX_THREADS] = {{0}};
    uint64_t *words = mem_alloc(bytes);
    size_t each = bytes / 8 / (size_t)n_threads;
    double best = 0;
    memset(words, 1, bytes);
    for (int i = 0; i < n_threads; i++) {
        probes[i] = (struct probe){words + each * (size_t)i, each, 0, 0};
    }
    for (int round = 0; round < 10 * n_rounds; round++) {
        double gbs = (double)(each * 8 * (size_t)n_threads) / run_threads(read_memory, probes);
        best = gbs > best ? gbs : best;
    }
    mem_free(words);
    return best;
}

static double measure_flops(void)
{
    struct probe probes[MAX_THREADS] = {{0}};
    double best = 0;
    for (int round = 0; round < n_rounds; round++) {
        double work = (double)n_threads * FMA_LOOPS * FMA_CHAINS * 8 * 2;
        double gflops = work / run_threads(multiply, probes);
        best = gflops > best ? gflops : best;
    }
    return best;
}

/* ---- what a token uses ---- */

struct use {
    double dense, expert; /* weights outside experts; of one expert, all layers together */
};

static struct use count_weights(const struct model_config *c)
{
    double hidden = c->hidden_size, width = (double)c->n_heads * c->head_dim;
    double mhc = 2.0 * c->hc_mult * hidden * (2 * c->hc_mult + c->hc_mult * c->hc_mult);
    struct use use = {hidden * c->vocab_size, 3.0 * hidden * c->expert_width * c->n_layers};
    for (uint32_t i = 0; i < c->n_layers; i++) {
        use.dense += hidden * c->q_lora_rank + c->q_lora_rank * width + hidden * c->head_dim;
        use.dense += width * c->o_lora_rank + (double)c->o_groups * c->o_lora_rank * hidden;
        use.dense += 3.0 * hidden * c->expert_width + hidden * c->n_experts + mhc;
        if (c->layers[i].kind == MODEL_LAYER_SPARSE) {
            use.dense += 4.0 * hidden * (c->head_dim + c->index_head_dim);
            use.dense += (double)c->q_lora_rank * c->index_n_heads * c->index_head_dim;
        } else if (c->layers[i].kind == MODEL_LAYER_HEAVY) {
            use.dense += 2.0 * hidden * c->head_dim;
        }
    }
    return use;
}

/* ---- ours ---- */

struct rate {
    double per_s, per_cpu_s;
};

static void rate_note(struct rate *best, double n, double seconds, double cpu)
{
    best->per_s = n / seconds > best->per_s ? n / seconds : best->per_s;
    best->per_cpu_s = n / cpu > best->per_cpu_s ? n / cpu : best->per_cpu_s;
}

static void must(enum status status, const char *what)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", what, status_name(status));
        exit(1);
    }
}

static struct engine_seq *prefill(struct engine *engine, uint32_t n, uint32_t chunk,
                                  uint32_t n_later)
{
    static uint32_t ids[CONTEXT];
    struct engine_seq *seq;
    struct engine_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    struct engine_row row = {.sampling = &greedy};
    for (uint32_t i = 0; i < n; i++) {
        ids[i] = 3 + i * 7919 % 2000;
    }
    must(engine_seq_create(engine, 1, &seq), "sequence");
    must(engine_seq_reserve(seq, n + n_later), "pages");
    for (uint32_t i = 0; i < n; i += chunk) {
        uint32_t n_now = n - i < chunk ? n - i : chunk;
        must(engine_prefill(engine, seq, ids + i, n_now, i + n_now == n ? &row : NULL, NULL, NULL),
             "prefill");
    }
    return seq;
}

static struct rate measure_prefill(struct engine *engine, uint32_t chunk)
{
    struct rate best = {0, 0};
    uint32_t n = chunk < 512 ? 512 : chunk;
    for (int round = 0; round < n_rounds; round++) {
        double cpu = cpu_seconds();
        uint64_t begin_ns = loop_now_ns();
        struct engine_seq *seq = prefill(engine, n, chunk, 0);
        rate_note(&best, n, (double)(loop_now_ns() - begin_ns) * 1e-9, cpu_seconds() - cpu);
        engine_seq_free(seq);
    }
    return best;
}

static struct rate measure_decode(struct engine *engine, uint32_t n_rows)
{
    struct engine_seq *seqs[MAX_ROWS];
    struct engine_sampling greedy = {.top_p = 1, .repetition_penalty = 1};
    struct engine_row rows[MAX_ROWS];
    struct rate best = {0, 0};
    for (uint32_t i = 0; i < n_rows; i++) {
        seqs[i] = prefill(engine, PROMPT + 5 * i, 512, STEPS * (uint32_t)n_rounds);
        rows[i] = (struct engine_row){.seq = seqs[i], .token = 5 + i, .sampling = &greedy};
    }
    for (int round = 0; round < n_rounds; round++) {
        double cpu = cpu_seconds();
        uint64_t begin_ns = loop_now_ns();
        for (int step = 0; step < STEPS; step++) {
            must(engine_step(engine, rows, n_rows), "step");
            for (uint32_t i = 0; i < n_rows; i++) {
                rows[i].token = rows[i].draw.id;
            }
        }
        rate_note(&best, (double)n_rows * STEPS, (double)(loop_now_ns() - begin_ns) * 1e-9,
                  cpu_seconds() - cpu);
    }
    for (uint32_t i = 0; i < n_rows; i++) {
        engine_seq_free(seqs[i]);
    }
    return best;
}

static void print_rate(const char *what, uint32_t n, struct rate rate, double floor)
{
    printf(
        "%-8s %5u  %9.1f tokens/s  %9.1f uninterrupted  floor %9.1f  ratio %4.1f %% / %4.1f %%\n",
        what, n, rate.per_s, rate.per_cpu_s * n_threads, floor, 100 * rate.per_s / floor,
        100 * rate.per_cpu_s * n_threads / floor);
}

static double min_of(double a, double b)
{
    return a < b ? a : b;
}

int main(int argc, char **argv)
{
    struct model_config *config = mem_zalloc(sizeof(*config));
    struct engine *engine;
    struct error err;
    if (argc < 2) {
        fprintf(stderr, "usage: bench_cpu MODEL [THREADS [ROUNDS]]\n");
        return 2;
    }
    log_init(LOG_LEVEL_WARN, false, NULL);
    n_threads = argc > 2 ? atoi(argv[2]) : n_threads;
    n_rounds = argc > 3 ? atoi(argv[3]) : n_rounds;
    if (n_threads < 1 || n_threads > MAX_THREADS || n_rounds < 1 || n_rounds > 20 ||
        model_config_load(argv[1], config, &err)) {
        fprintf(stderr, "bench_cpu: the arguments, or %s, are not right\n", argv[1]);
        return 2;
    }
    struct engine_options options = {.kind = "model",
                                     .model_dir = argv[1],
                                     .device = "cpu",
                                     .n_threads = (uint32_t)n_threads,
                                     .max_sequences = MAX_ROWS,
                                     .n_pages = 128,
                                     .max_context_tokens = CONTEXT,
                                     .max_chunk_tokens = 2048,
                                     .max_batch_rows = MAX_ROWS};
    double load_s = 1e9;
    for (int round = 0; round < n_rounds; round++) {
        uint64_t begin_ns = loop_now_ns();
        if (engine_open(&options, NULL, &engine, &err)) {
            fprintf(stderr, "%s\n", err.text);
            return 1;
        }
        load_s = min_of(load_s, (double)(loop_now_ns() - begin_ns) * 1e-9);
        if (round + 1 < n_rounds) {
            engine_close(engine);
        }
    }
    struct use use = count_weights(config);
    double all = use.dense + use.expert * config->n_experts;
    double token = use.dense + use.expert * config->n_experts_used;
    size_t bytes = (size_t)all; /* a byte a weight: FP8; MXFP4 has half of that */
    double read_gbs = measure_read(bytes), gflops = measure_flops();
    printf("%s, %d threads, best of %d: opened in %.3f s; %.1f M weights, %.2f M used a token\n",
           config->name, n_threads, n_rounds, load_s, all * 1e-6, token * 1e-6);
    printf("floors: %.1f GB/s read of %zu bytes, %.1f GFLOP/s\n", read_gbs, bytes, gflops);
    double flop_floor = gflops * 1e9 / (2 * token);
    for (uint32_t chunk = 64; chunk <= 2048; chunk *= 2) {
        print_rate("prefill", chunk, measure_prefill(engine, chunk), flop_floor);
    }
    for (uint32_t n = 1; n <= MAX_ROWS; n *= 4) {
        double experts = min_of(config->n_experts, (double)n * config->n_experts_used);
        double step_bytes = use.dense + 0.53 * use.expert * experts; /* 4 bits and a scale per 32 */
        print_rate("decode", n, measure_decode(engine, n),
                   min_of(flop_floor, n * read_gbs * 1e9 / step_bytes));
    }
    engine_close(engine);
    mem_free(config);
    return 0;
}
