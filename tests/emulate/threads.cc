/* Blocks and their threads, see emulate.h. */
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <thread>
#include <time.h>
#include <unistd.h>
#include <vector>

#include <boost/context/detail/fcontext.hpp>

#include "tests/emulate/emulate.h"

namespace ctx = boost::context::detail;

namespace emulate
{
namespace
{

enum {
    STACK_BYTES = 128 << 10,
    PAGE_BYTES = 4096,
    MAX_THREADS = 1024,
    MAX_SHARED_BYTES = 256 << 10,
    N_BARRIERS = 16,
    N_MEETINGS = 8, /* masks in use at a time in a warp */
    MAX_DEVICES = 16,
    STUCK_S = 60
};

enum state { READY, AT_MEETING, AT_BARRIER, AT_GRID, SPINNING, ENDED };

struct meeting {
    uint32_t mask, arrived;
    uint64_t turn;
    const char *what;
    value values[2][WARP];
};

struct copy {
    void *to;
    const void *from;
    size_t bytes;
};

struct fiber {
    position at;
    uint32_t warp, lane;
    enum state state;
    const char *what; /* where it waits */
    ctx::fcontext_t context;
    uint32_t barrier;
    bool has_gone, has_waited;     /* grid_go, grid_wait */
    std::vector<copy> open_copies; /* of the group that is not closed */
    std::deque<std::vector<copy>> copies;
};

struct barrier_state {
    uint32_t arrived, wanted;
};

struct warp_state {
    uint32_t alive;
    meeting meetings[N_MEETINGS];
};

/* Of a grid. */
struct job {
    const char *name;
    dim3 grid, block;
    size_t shared_bytes;
    const std::function<void()> *body;
    bool waits; /* as launched.waits */
    uint64_t n_blocks, n_threads, seed;
    std::atomic<uint64_t> next{0};
    uint64_t end; /* behind the last block that `next` hands out */
};

/* A host thread that runs a block ahead: as far as its threads come while the grid in front has not
 * run, and on once that has. */
struct runner {
    enum { FREE, GIVEN, HELD, RELEASED } state = FREE;
    std::mutex lock;
    std::condition_variable changed;
    job *j = NULL;
    uint64_t block = 0;
};

/* A host thread that runs blocks: its fibers' stacks and what the running block has. */
struct worker {
    char *stacks = NULL;
    char *shared_area = NULL;
    job *running = NULL;
    runner *ahead = NULL; /* the grid in front has not run */
    uint64_t random = 0;
    uint32_t n_threads = 0, n_warps = 0, n_alive = 0;
    ctx::fcontext_t scheduler = NULL;
    fiber *current = NULL;
    barrier_state barriers[N_BARRIERS];
    std::vector<fiber> fibers;
    std::vector<warp_state> warps;
    std::vector<uint32_t> warp_order;
    uint8_t lane_order[WARP];
};

thread_local worker *here = NULL;

uint32_t number_of(const char *name, uint32_t standard)
{
    const char *text = getenv(name);
    return text && *text ? (uint32_t)strtoul(text, NULL, 10) : standard;
}

uint64_t next_random(worker *w)
{
    w->random = w->random * 6364136223846793005u + 1442695040888963407u;
    return w->random >> 33;
}

const char *state_name(enum state state)
{
    static const char *const names[] = {"runs",        "meets", "at a barrier",
                                        "at the grid", "spins", "ended"};
    return names[state];
}

void tell_threads(const worker *w)
{
    for (uint32_t warp = 0; warp < w->n_warps; warp++) {
        for (uint32_t first = warp * WARP, i = first, end; i < w->n_threads && i < first + WARP;
             i = end) {
            const fiber &f = w->fibers[i];
            for (end = i + 1; end < w->n_threads && end < first + WARP &&
                              w->fibers[end].state == f.state && w->fibers[end].what == f.what;
                 end++) {
            }
            fprintf(stderr, "  warp %u lanes %u to %u: %s %s\n", warp, i - first, end - 1 - first,
                    state_name(f.state), f.what ? f.what : "");
        }
    }
}

void release(worker *w, uint32_t id)
{
    barrier_state *b = &w->barriers[id];
    for (fiber &f : w->fibers) {
        if (f.state == AT_BARRIER && f.barrier == id) {
            f.state = READY;
            f.what = NULL;
        }
    }
    b->arrived = b->wanted = 0;
}

/* A barrier of all threads counts those that still run. */
void look_at_barriers(worker *w)
{
    for (uint32_t id = 0; id < N_BARRIERS; id++) {
        barrier_state *b = &w->barriers[id];
        if (b->arrived && b->arrived >= (b->wanted ? b->wanted : w->n_alive)) {
            release(w, id);
        }
    }
}

void yield(enum state state, const char *what)
{
    fiber *f = here->current;
    f->state = state;
    f->what = what;
    here->scheduler = ctx::jump_fcontext(here->scheduler, NULL).fctx;
}

void fiber_main(ctx::transfer_t from)
{
    worker *w = here;
    w->scheduler = from.fctx;
    (*w->running->body)();
    fiber *f = w->current;
    if (w->running->waits && !f->has_waited) {
        fault("it ended and has not waited for the launch in front of its own");
    }
    f->state = ENDED;
    f->what = NULL;
    w->n_alive--;
    w->warps[f->warp].alive &= ~(1u << f->lane);
    for (const meeting &m : w->warps[f->warp].meetings) {
        if (m.arrived && (m.mask >> f->lane & 1)) {
            fault("lane %u of warp %u ended, and others wait for it in %s", f->lane, f->warp,
                  m.what);
        }
    }
    look_at_barriers(w);
    ctx::jump_fcontext(w->scheduler, NULL);
    abort();
}

void run_fiber(worker *w, fiber *f)
{
    w->current = f;
    f->state = READY;
    f->context = ctx::jump_fcontext(f->context, NULL).fctx;
    w->current = NULL;
}

void shuffle(worker *w)
{
    if (!w->running->seed) {
        return;
    }
    for (uint32_t i = w->n_warps; i > 1; i--) {
        std::swap(w->warp_order[i - 1], w->warp_order[next_random(w) % i]);
    }
    for (uint32_t i = WARP; i > 1; i--) {
        std::swap(w->lane_order[i - 1], w->lane_order[next_random(w) % i]);
    }
}

/* One warp as far as it comes; whether it came anywhere. */
bool run_warp(worker *w, uint32_t warp)
{
    bool any = false;
    for (bool again = true; again;) {
        again = false;
        for (uint32_t k = 0; k < WARP; k++) {
            uint32_t i = warp * WARP + w->lane_order[k];
            if (i < w->n_threads && w->fibers[i].state == READY) {
                run_fiber(w, &w->fibers[i]);
                again = any = true;
            }
        }
    }
    return any;
}

bool run_spinning(worker *w)
{
    bool any = false;
    for (fiber &f : w->fibers) {
        if (f.state == SPINNING) {
            run_fiber(w, &f);
            any = true;
        }
    }
    return any;
}

/* Whether threads wait for the grid in front, until that has run. */
bool hold_back(worker *w)
{
    bool any = false;
    for (const fiber &f : w->fibers) {
        any = any || f.state == AT_GRID;
    }
    if (!any) {
        return false;
    }
    runner *r = w->ahead;
    std::unique_lock<std::mutex> hold(r->lock);
    r->state = runner::HELD;
    r->changed.notify_all();
    r->changed.wait(hold, [&] { return r->state == runner::RELEASED; });
    w->ahead = NULL;
    for (fiber &f : w->fibers) {
        if (f.state == AT_GRID) {
            f.state = READY;
            f.what = NULL;
        }
    }
    return true;
}

void run_threads(worker *w)
{
    time_t since = time(NULL);
    while (w->n_alive) {
        bool any = false;
        shuffle(w);
        for (uint32_t k = 0; k < w->n_warps; k++) {
            any = run_warp(w, w->warp_order[k]) || any;
        }
        if (any) {
            since = time(NULL);
            continue;
        }
        if (w->ahead && hold_back(w)) {
            since = time(NULL);
            continue;
        }
        if (!run_spinning(w)) {
            tell_threads(w);
            fault("no thread of the block can go on");
        }
        if (time(NULL) - since > STUCK_S) {
            tell_threads(w);
            fault("a block has spun for %d s", STUCK_S);
        }
        std::this_thread::yield();
    }
}

void run_block(worker *w, uint64_t index)
{
    job *j = w->running;
    uint3 block = {(unsigned)(index % j->grid.x), (unsigned)(index / j->grid.x % j->grid.y),
                   (unsigned)(index / j->grid.x / j->grid.y)};
    w->n_threads = w->n_alive = (uint32_t)j->n_threads;
    w->n_warps = (w->n_threads + WARP - 1) / WARP;
    w->random = j->seed * 0x9e3779b97f4a7c15u + index;
    w->fibers.assign(w->n_threads, fiber());
    w->warps.resize(w->n_warps);
    memset(w->barriers, 0, sizeof(w->barriers));
    w->warp_order.resize(w->n_warps);
    for (uint32_t i = 0; i < w->n_warps; i++) {
        uint32_t n = std::min<uint32_t>(WARP, w->n_threads - i * WARP);
        w->warp_order[i] = i;
        w->warps[i].alive = n == WARP ? 0xffffffffu : (1u << n) - 1;
        for (meeting &m : w->warps[i].meetings) {
            m.mask = m.arrived = 0;
        }
    }
    for (uint32_t i = 0; i < WARP; i++) {
        w->lane_order[i] = (uint8_t)i;
    }
    for (uint32_t i = 0; i < w->n_threads; i++) {
        fiber *f = &w->fibers[i];
        f->at.thread = {i % j->block.x, i / j->block.x % j->block.y, i / j->block.x / j->block.y};
        f->at.block = block;
        f->at.block_dim = j->block;
        f->at.grid_dim = j->grid;
        f->warp = i / WARP;
        f->lane = i % WARP;
        f->context = ctx::make_fcontext(w->stacks + (size_t)(i + 1) * STACK_BYTES,
                                        STACK_BYTES - PAGE_BYTES, fiber_main);
    }
    memset(static_cast<char *>(shared()), 0xff, j->shared_bytes);
    run_threads(w);
}

/* Stacks with a page between them that nobody may touch; shared memory that ends in one. */
void make_areas(worker *w)
{
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t bytes = (size_t)MAX_THREADS * STACK_BYTES;
    void *stacks = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    void *area = mmap(NULL, MAX_SHARED_BYTES + PAGE_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (stacks == MAP_FAILED || area == MAP_FAILED) {
        fault("no memory for a block");
    }
    w->stacks = static_cast<char *>(stacks);
    w->shared_area = static_cast<char *>(area);
    for (size_t i = 0; i < MAX_THREADS; i++) {
        mprotect(w->stacks + i * STACK_BYTES, PAGE_BYTES, PROT_NONE);
    }
    mprotect(w->shared_area + MAX_SHARED_BYTES, PAGE_BYTES, PROT_NONE);
}

/* A host thread's end is its worker's: a program's own threads come and go. */
struct worker_end {
    bool is_due = false;
    ~worker_end()
    {
        if (is_due) {
            munmap(here->stacks, (size_t)MAX_THREADS * STACK_BYTES);
            munmap(here->shared_area, MAX_SHARED_BYTES + PAGE_BYTES);
            delete here;
        }
    }
};
thread_local worker_end end_of_thread;

worker *worker_of_thread()
{
    if (!here) {
        here = new worker();
        make_areas(here);
        end_of_thread.is_due = true;
    }
    return here;
}

void run_blocks(job *j)
{
    worker *w = worker_of_thread();
    w->running = j;
    for (uint64_t i; (i = j->next.fetch_add(1)) < j->end;) {
        run_block(w, i);
    }
    w->running = NULL;
}

/* A device's multiprocessors: host threads that wait for a grid. */
struct pool {
    std::mutex lock;
    std::condition_variable wake, done;
    job *current = NULL;
    std::function<void()> body, ended; /* of a grid that nobody waits for here */
    uint64_t turn = 0;
    uint32_t n = 0, busy = 0;
};

pool &pool_of(int device)
{
    static pool *pools = new pool[MAX_DEVICES](); /* outlive the host threads */
    if (device < 0 || device >= MAX_DEVICES) {
        fault("device %d", device);
    }
    return pools[device];
}

void serve(pool *of, uint64_t seen)
{
    pool &p = *of;
    std::unique_lock<std::mutex> hold(p.lock);
    for (;;) {
        p.wake.wait(hold, [&] { return p.turn != seen; });
        seen = p.turn;
        job *j = p.current;
        hold.unlock();
        run_blocks(j);
        hold.lock();
        if (--p.busy == 0) {
            std::function<void()> ended = std::move(p.ended);
            if (ended) {
                delete j;
                p.ended = nullptr;
                hold.unlock();
                ended();
                hold.lock();
            } else {
                p.done.notify_all();
            }
        }
    }
}

void run_ahead(runner *r)
{
    worker *w = worker_of_thread();
    std::unique_lock<std::mutex> hold(r->lock);
    for (;;) {
        r->changed.wait(hold, [&] { return r->state == runner::GIVEN; });
        w->running = r->j;
        w->ahead = r;
        hold.unlock();
        run_block(w, r->block);
        hold.lock();
        w->running = NULL;
        w->ahead = NULL;
        r->state = runner::FREE;
        r->changed.notify_all();
    }
}

std::vector<runner *> &free_runners() /* under the runtime's lock */
{
    static std::vector<runner *> *all = new std::vector<runner *>();
    return *all;
}

} /* namespace */

struct begun {
    job j;
    int device;
    std::function<void()> body;
    std::vector<runner *> runners;
};

const position &self()
{
    return here->current->at;
}

uint32_t self_lane()
{
    return here->current->lane;
}

void *shared()
{
    const job *j = here->running;
    return here->shared_area + MAX_SHARED_BYTES - (j->shared_bytes + 127) / 128 * 128;
}

void fault(const char *format, ...)
{
    const worker *w = here;
    fprintf(stderr, "emulated kernel");
    if (w && w->running) {
        fprintf(stderr, " %s", w->running->name);
    }
    if (w && w->current) {
        const position &at = w->current->at;
        fprintf(stderr, ", block (%u, %u, %u), thread (%u, %u, %u)", at.block.x, at.block.y,
                at.block.z, at.thread.x, at.thread.y, at.thread.z);
    }
    fprintf(stderr, ": ");
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    abort();
}

const value *meet(uint32_t mask, const char *what, const value &mine)
{
    worker *w = here;
    fiber *f = w->current;
    warp_state *warp = &w->warps[f->warp];
    if (!(mask >> f->lane & 1)) {
        fault("%s: the mask %#x leaves out the calling lane %u", what, mask, f->lane);
    }
    if ((warp->alive & mask) != mask) {
        fault("%s: the mask %#x names lanes that have ended: %#x still run", what, mask,
              warp->alive);
    }
    meeting *m = NULL;
    for (meeting &other : warp->meetings) {
        if (other.mask == mask) {
            m = &other;
            break;
        }
        if (other.arrived && (other.mask >> f->lane & 1) == 0 && (other.mask & mask)) {
            fault("%s: the masks %#x and %#x of one warp overlap", what, mask, other.mask);
        }
        if (!m && other.mask == 0) {
            m = &other;
        }
    }
    if (!m) {
        fault("%s: more than %d masks in one warp", what, N_MEETINGS);
    }
    if (m->mask != mask) {
        m->mask = mask;
        m->turn = 0;
    }
    if (m->arrived && strcmp(m->what, what) != 0) {
        fault("lanes of a warp meet in %s and in %s", m->what, what);
    }
    m->what = what;
    value *values = m->values[m->turn & 1];
    values[f->lane] = mine;
    m->arrived |= 1u << f->lane;
    if (m->arrived != mask) {
        yield(AT_MEETING, what);
        return values;
    }
    m->arrived = 0;
    m->turn++;
    for (uint32_t lane = 0; lane < WARP; lane++) {
        if (lane != f->lane && (mask >> lane & 1)) {
            w->fibers[f->warp * WARP + lane].state = READY;
            w->fibers[f->warp * WARP + lane].what = NULL;
        }
    }
    return values;
}

void barrier(uint32_t id, uint32_t n_threads)
{
    worker *w = here;
    if (id >= N_BARRIERS || n_threads > w->n_threads || n_threads % WARP) {
        fault("barrier %u of %u threads", id, n_threads);
    }
    barrier_state *b = &w->barriers[id];
    if (b->arrived && b->wanted != n_threads) {
        fault("barrier %u is waited at for %u and for %u threads", id, b->wanted, n_threads);
    }
    b->wanted = n_threads;
    b->arrived++;
    w->current->barrier = id;
    w->current->state = AT_BARRIER;
    look_at_barriers(w);
    if (w->current->state == AT_BARRIER) {
        yield(AT_BARRIER, "__syncthreads");
    }
}

void copy_later(void *to, const void *from, size_t bytes)
{
    here->current->open_copies.push_back({to, from, bytes});
}

void copies_close()
{
    fiber *f = here->current;
    f->copies.push_back(std::move(f->open_copies));
    f->open_copies.clear();
}

void copies_wait(uint32_t n_left)
{
    fiber *f = here->current;
    for (; f->copies.size() > n_left; f->copies.pop_front()) {
        for (const copy &c : f->copies.front()) {
            memcpy(c.to, c.from, c.bytes);
        }
    }
}

void grid_go()
{
    here->current->has_gone = true;
}

void grid_wait()
{
    fiber *f = here->current;
    if (!f->has_gone) {
        fault("it waits for the launch in front of its own before it lets the next begin");
    }
    f->has_waited = true;
    if (here->ahead) {
        yield(AT_GRID, NULL);
    }
}

void spin()
{
    yield(SPINNING, "for memory");
}

static void describe(const launched &what, const std::function<void()> *body, job *ret_job)
{
    static std::atomic<uint64_t> n_launches{0};
    static const uint32_t seed = number_of("EMULATED_ORDER", 1);
    ret_job->name = what.name;
    ret_job->grid = what.grid;
    ret_job->block = what.block;
    ret_job->shared_bytes = what.shared_bytes;
    ret_job->body = body;
    ret_job->waits = what.waits;
    ret_job->n_blocks = (uint64_t)what.grid.x * what.grid.y * what.grid.z;
    ret_job->end = ret_job->n_blocks;
    ret_job->n_threads = (uint64_t)what.block.x * what.block.y * what.block.z;
    ret_job->seed = seed ? seed + n_launches.fetch_add(1) : 0;
}

/* With the pool's lock. */
static void hand_out(pool *p, job *j)
{
    for (uint32_t wanted = number_of("EMULATED_SMS", 4); p->n < wanted; p->n++) {
        std::thread(serve, p, p->turn).detach();
    }
    p->current = j;
    p->busy = p->n;
    p->turn++;
    p->wake.notify_all();
}

static void run_job(job *j, int device)
{
    if (j->end - j->next <= 1) {
        run_blocks(j);
        return;
    }
    pool &p = pool_of(device);
    std::unique_lock<std::mutex> hold(p.lock);
    hand_out(&p, j);
    p.done.wait(hold, [&] { return p.busy == 0; });
}

void run_grid(const launched &what, const std::function<void()> &body)
{
    job j;
    describe(what, &body, &j);
    run_job(&j, what.device);
}

/* The first block, and the last. */
std::shared_ptr<begun> begin_grid(const launched &what, const std::function<void()> &body)
{
    auto b = std::make_shared<begun>();
    b->device = what.device;
    b->body = body;
    describe(what, &b->body, &b->j);
    const uint64_t last = b->j.n_blocks - 1;
    for (uint64_t block : {(uint64_t)0, last}) {
        if (b->runners.size() == b->j.n_blocks) {
            break;
        }
        std::vector<runner *> &all = free_runners();
        if (all.empty()) {
            all.push_back(new runner());
            std::thread(run_ahead, all.back()).detach();
        }
        runner *r = all.back();
        all.pop_back();
        b->runners.push_back(r);
        std::unique_lock<std::mutex> hold(r->lock);
        r->j = &b->j;
        r->block = block;
        r->state = runner::GIVEN;
        r->changed.notify_all();
        r->changed.wait(hold, [&] { return r->state != runner::GIVEN; });
    }
    b->j.next = 1;
    b->j.end = last;
    return b;
}

void end_grid(begun *b)
{
    for (runner *r : b->runners) {
        std::lock_guard<std::mutex> hold(r->lock);
        r->state = r->state == runner::HELD ? runner::RELEASED : r->state;
        r->changed.notify_all();
    }
    if (b->j.next < b->j.end) {
        run_job(&b->j, b->device);
    }
    for (runner *r : b->runners) {
        std::unique_lock<std::mutex> hold(r->lock);
        r->changed.wait(hold, [&] { return r->state == runner::FREE; });
        free_runners().push_back(r);
    }
}

void start_grid(const launched &what, std::function<void()> body, std::function<void()> ended)
{
    pool &p = pool_of(what.device);
    job *j = new job(); /* serve deletes it */
    std::unique_lock<std::mutex> hold(p.lock);
    if (p.busy) {
        fault("two grids at a time on device %d", what.device);
    }
    p.body = std::move(body);
    p.ended = std::move(ended);
    describe(what, &p.body, j);
    hand_out(&p, j);
}

} /* namespace emulate */
