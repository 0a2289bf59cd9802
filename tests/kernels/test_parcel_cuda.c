/* The device's copy-and-checksum pass against the CPU's: same digest, same bytes, poisoned
 * destination; in odd rounds pieces end 8 bytes beside 16. With an argument, small and not timed,
 * for tools that watch every access. 77 without a device. */
#include "kernels/cuda/parcel.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/device.h"

enum { N_PIECES = 33, PAGE_BYTES = 901120 };

struct timed {
    struct parcel_key key;
    struct parcel_piece_device *pieces;
    uint64_t *sums;
};

static void run(void *cookie, void *stream)
{
    struct timed *t = cookie;
    if (parcel_copy_sum_launch(&t->key, t->pieces, N_PIECES, t->sums, stream)) {
        abort();
    }
}

static void need(enum status status, const char *what, const struct error *err)
{
    if (status) {
        fprintf(stderr, "%s: %s\n", what, err->text);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    char text[128];
    struct error err = {""};
    if (device_count() == 0) {
        puts("no CUDA device: skipped");
        return 77;
    }
    need(device_select(0, text, sizeof(text), &err), "device", &err);
    printf("%s\n", text);
    size_t bytes[N_PIECES], all = 0;
    for (int i = 0; i < N_PIECES; i++) {
        bytes[i] = i < N_PIECES - 1 ? PAGE_BYTES : 16 * 12345;
        bytes[i] = argc > 1 ? bytes[i] / 80 / 16 * 16 : bytes[i];
        all += bytes[i];
    }
    uint8_t *host = aligned_alloc(4096, (all + 4095) / 4096 * 4096), *back = malloc(all);
    for (size_t i = 0; i < all; i++) {
        host[i] = (uint8_t)(i * 2654435761u >> 13);
    }
    void *src, *dst, *pieces_d, *sums_d;
    need(device_alloc(all, &src, &err), "src", &err);
    need(device_alloc(all, &dst, &err), "dst", &err);
    need(device_alloc(sizeof(struct parcel_piece_device) * N_PIECES, &pieces_d, &err), "pieces",
         &err);
    need(device_alloc(16, &sums_d, &err), "sums", &err);
    struct parcel_piece_device pieces[N_PIECES];
    uint64_t sums[2];
    int bad = 0;
    struct timed timed = {.pieces = pieces_d, .sums = sums_d};
    for (unsigned round = 0; round < 8; round++) {
        struct parcel_sum sum = {{0, 0}};
        size_t at = 0;
        parcel_key_make(&timed.key, 0x9e37u * round, round);
        for (int i = 0; i < N_PIECES; i++) {
            size_t n = bytes[i] - 8 * (round * 7u % 100);
            pieces[i] =
                (struct parcel_piece_device){(uint8_t *)dst + at, (uint8_t *)src + at, n, at / 8};
            parcel_copy_sum(&timed.key, &sum, NULL, host + at, n, at / 8);
            at += bytes[i];
        }
        need(device_copy(src, host, all, NULL), "copy", &err);
        need(device_fill(dst, 0xa5, all, NULL), "poison", &err);
        need(device_fill(sums_d, 0, 16, NULL), "zero", &err);
        need(device_copy(pieces_d, pieces, sizeof(pieces), NULL), "pieces", &err);
        run(&timed, NULL);
        need(device_copy(back, dst, all, NULL), "back", &err);
        need(device_copy(sums, sums_d, 16, NULL), "sums", &err);
        need(device_wait(NULL, &err), "wait", &err);
        struct parcel_sum got = {{sums[0], sums[1]}};
        if (parcel_digest(&got, all) != parcel_digest(&sum, all)) {
            fprintf(stderr, "round %u: digest differs from the CPU's\n", round);
            bad = 1;
        }
        for (int i = 0; i < N_PIECES; i++) {
            size_t off = (size_t)((uint8_t *)pieces[i].dst - (uint8_t *)dst), n = pieces[i].bytes;
            bad |= memcmp(back + off, host + off, n) != 0;
            for (size_t k = n; k < bytes[i]; k++) {
                bad |= back[off + k] != 0xa5;
            }
        }
    }
    if (argc == 1) {
        float ms;
        need(device_time(run, &timed, 100, &ms, &err), "time", &err);
        printf("%zu bytes: %.1f us a pass, %.0f GB/s copied and summed\n", all, ms * 10,
               (double)all / (ms * 1e4));
        need(device_pin(host, all, &err), "pin", &err);
        need(device_pin(host, all, &err), "pin what is pinned", &err);
        for (int i = 0; i < N_PIECES; i++) {
            pieces[i].src = host + ((const uint8_t *)pieces[i].src - (const uint8_t *)src);
        }
        need(device_copy(pieces_d, pieces, sizeof(pieces), NULL), "pieces", &err);
        need(device_time(run, &timed, 20, &ms, &err), "time", &err);
        printf("from pinned host memory: %.1f us a pass, %.1f GB/s\n", ms * 50,
               (double)all / (ms * 5e4));
        device_unpin(host);
    }
    device_free(src);
    device_free(dst);
    device_free(pieces_d);
    device_free(sums_d);
    free(host);
    free(back);
    return bad;
}
