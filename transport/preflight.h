/* transport/preflight.h - what put.c sees of preflight.c. Private to transport/. */
#ifndef BATON_TRANSPORT_PREFLIGHT_H
#define BATON_TRANSPORT_PREFLIGHT_H

struct preflight;

/* The regions are unmapped: frees what a preflight that ended during transport_close left. */
void preflight_free(struct preflight *preflight);

#endif
