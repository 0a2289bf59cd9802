#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/secret.h"

/* SEC-01: the comparison of keys and tokens. */

static void test_values(void **state)
{
    const char secret[] = "sesame-5061\x80\xff";
    const size_t bytes = sizeof(secret) - 1;
    assert_true(secret_equal(secret, secret, bytes));
    assert_true(secret_equal("", "", 0));
    assert_false(secret_equal("", "x", 1));
    for (size_t n = 0; n < bytes; n++) {
        assert_false(secret_equal(secret, secret, n)); /* what it begins with */
    }
    char longer[64] = {0};
    memcpy(longer, secret, bytes);
    for (size_t n = bytes + 1; n < sizeof(longer); n++) {
        assert_false(secret_equal(secret, longer, n)); /* a NUL is a byte like others */
    }
    memcpy(longer + bytes, secret, bytes);
    assert_false(secret_equal(secret, longer, 2 * bytes));
    for (size_t i = 0; i < bytes; i++) {
        for (unsigned bit = 0; bit < 8; bit++) {
            memcpy(longer, secret, bytes);
            longer[i] = (char)(longer[i] ^ 1 << bit);
            assert_false(secret_equal(secret, longer, bytes));
        }
    }
}

/*
 * That nothing ends at the first difference, seen without a clock: the second half of what was sent
 * lies in a page that may not be read, and whoever reads it is noted. A loop that ends
 * early is the control.
 */
static volatile sig_atomic_t n_touched;
static char *far_page;
static long page_bytes;

static void on_fault(int number, siginfo_t *info, void *context)
{
    char *at = info->si_addr;
    if (at < far_page || at >= far_page + page_bytes) {
        _exit(3);
    }
    n_touched++;
    mprotect(far_page, (size_t)page_bytes, PROT_READ | PROT_WRITE);
}

static bool ends_early(const char *a, const char *b, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (*(const volatile char *)(a + i) != b[i]) {
            return false;
        }
    }
    return true;
}

static void test_every_byte_is_read(void **state)
{
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO}, old;
    page_bytes = sysconf(_SC_PAGESIZE);
    char *pages = mmap(NULL, 2 * (size_t)page_bytes, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(pages != MAP_FAILED);
    far_page = pages + page_bytes;
    static char secret[65];
    memset(secret, 's', 64);
    char *sent = far_page - 32; /* half on each page */
    assert_int_equal(sigaction(SIGSEGV, &action, &old), 0);
    for (int differs = -1; differs < 32; differs++) {
        for (int control = 0; control < 2; control++) {
            memcpy(sent, secret, 64);
            sent[differs < 0 ? 63 : differs] = 'x'; /* in what can be read, or at the very end */
            n_touched = 0;
            assert_int_equal(mprotect(far_page, (size_t)page_bytes, PROT_NONE), 0);
            bool equal = control ? ends_early(sent, secret, 64) : secret_equal(secret, sent, 64);
            mprotect(far_page, (size_t)page_bytes, PROT_READ | PROT_WRITE);
            assert_false(equal);
            assert_int_equal(n_touched, control && differs >= 0 ? 0 : 1);
        }
    }
    sigaction(SIGSEGV, &old, NULL);
    munmap(pages, 2 * (size_t)page_bytes);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_every_byte_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
