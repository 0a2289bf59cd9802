/* tests/handoff/fake.h - a prefill node that the test plays itself, and that lies on request.
 *
 * Made of rpc/ and transport/ alone: it answers the hello and the preflight as it should and then,
 * for each Run, does what its mode says. MODE_GOOD is the control: if that one did not come
 * through, no failure of the others would mean anything.
 */
#ifndef BATON_TESTS_HANDOFF_FAKE_H
#define BATON_TESTS_HANDOFF_FAKE_H

#include "cluster.h"

enum fake_mode {
    MODE_GOOD,
    MODE_WRONG_CHECKSUM,
    MODE_TORN,            /* the slot holds other bytes than were summed: a stale or torn write */
    MODE_OTHER_PROMPT,    /* right sums, the pages of somebody else */
    MODE_SLOT_OF_OTHERS,  /* a slot that was not granted */
    MODE_SLOT_TWICE,      /* a slot that was used before */
    MODE_SLOT_RUN_HUGE,   /* runs that count to the end of the numbers */
    MODE_SLOT_RUN_ODD,    /* half a run */
    MODE_FEW_SLOTS,       /* fewer slots than bytes */
    MODE_GAP,             /* the second page first */
    MODE_OVERLAP,         /* a page twice */
    MODE_TOO_MANY_PAGES,  /* more than the prompt has */
    MODE_NO_PAGES,        /* a parcel of nothing */
    MODE_SEQ_GAP,         /* parcels out of number */
    MODE_TAIL_LONG,       /* a tail of another size */
    MODE_TAIL_OFFSET,     /* the end of the tail first */
    MODE_KIND_UNKNOWN,    /* neither pages nor tail */
    MODE_PIECE_LATER,     /* pieces of pages that do not begin where the pages end */
    MODE_PIECE_DUST,      /* eight bytes of each page */
    MODE_PIECE_LONG,      /* more than is left of the pages */
    MODE_PIECE_ODD,       /* bytes that are not as many of each page */
    MODE_PIECE_AGAIN,     /* the first half of the pages, twice */
    MODE_HALF_PAGES,      /* the first half of each page, and done */
    MODE_DONE_AFTER_HALF, /* First and Done, pages missing */
    MODE_DONE_NO_TAIL,
    MODE_DONE_NO_FIRST,
    MODE_DONE_COUNT,    /* says another number of parcels */
    MODE_FIRST_SAMPLES, /* tokens for more samples than were asked for */
    MODE_FIRST_VOCABULARY,
    MODE_FIRST_TWICE,
    MODE_FIRST_LOGPROBS,  /* logprobs that nobody asked for, without a token */
    MODE_PARCEL_UNASKED,  /* before any slot was granted */
    MODE_FAILED_HALF_WAY, /* gives up after half the pages, with its reason */
    MODE_FAILED_STALLED,  /* the same, because its puts no longer complete */
    MODE_FAILED_ODD_CODE,
    MODE_SILENT,   /* nothing after the Run */
    MODE_STARTED,  /* begins to compute, and nothing more */
    MODE_COMPUTED, /* has computed, and nothing more */
    MODE_LATE,     /* sends everything when the Cancel has come */
    MODE_GARBAGE,  /* bytes that are no message */
    MODE_WRITER,   /* takes its slots and is silent; see fake_write_on */
    MODE_HELLO_TWICE,
    /* of the pair, not of a transfer */
    MODE_HELLO_FINGERPRINT,
    MODE_HELLO_INCARNATION,
    MODE_PATTERN,
    MODE_PREFLIGHT_SLOTS,
};

extern enum fake_mode fake_mode;
extern uint32_t fake_n_runs, fake_n_links, fake_n_cancels;

/*
 * The late writer: from now on random bytes go into every slot that was ever granted to the fake,
 * over and over, whatever becomes of its transfers, its link and the peer's view of it. stop: no
 * new puts; on again: it continues.
 */
void fake_write_on(bool on);
extern uint64_t fake_n_written; /* slots written so */
/* UCX transports of the fake (as --ucx-tls); set before the group's setup. */
extern const char *fake_tls;
/* The fake lets go of its link to the decode node, and of nothing else. */
void fake_link_close(void);

/* Opens the transport and adds Prefill.Serve to the server: give it to cluster_streams. */
void fake_streams(void);
void fake_close(void);

struct transport *fake_transport(void);

#endif
