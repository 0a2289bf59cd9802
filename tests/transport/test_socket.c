/* What UCX does on sockets through us: a connect that nobody answers ends soon, and a connection
 * that nobody acknowledges is given up by the kernel. See transport/ucx_socket.c. */
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmocka.h>
#include <ucs/sys/sock.h>

#include "base/loop.h"
#include "tests/lost.h"
#include "transport/ucx_socket.h"

/* A socket that listens and accepts nothing; its address. */
static int listener(struct sockaddr_in *ret_address)
{
    socklen_t bytes = sizeof *ret_address;
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    *ret_address =
        (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    assert_int_equal(bind(fd, (struct sockaddr *)ret_address, bytes), 0);
    assert_int_equal(listen(fd, 0), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)ret_address, &bytes), 0);
    return fd;
}

static void test_ours(void **state)
{
    assert_true(ucx_socket_is_ours());
    assert_true(ucx_pool_is_ours());
}

static void test_connect(void **state)
{
    struct sockaddr_in address;
    int fd = listener(&address), one = socket(AF_INET, SOCK_STREAM, 0);
    assert_int_equal(ucs_socket_connect(one, (struct sockaddr *)&address), UCS_OK);
    assert_int_equal(fcntl(one, F_GETFL) & O_NONBLOCK, 0); /* as it was */
    close(one);
    close(fd);
    one = socket(AF_INET, SOCK_STREAM, 0);
    assert_true(ucs_socket_connect(one, (struct sockaddr *)&address) < 0); /* refused */
    close(one);
}

/* A full backlog drops what comes: to the caller that is a network that was cut. */
static void test_unanswered(void **state)
{
    enum { MANY = 16 };
    struct sockaddr_in address;
    int fd = listener(&address), fill[MANY];
    for (int i = 0; i < MANY; i++) {
        fill[i] = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        (void)connect(fill[i], (struct sockaddr *)&address, sizeof address);
    }
    usleep(50000);
    int one = socket(AF_INET, SOCK_STREAM, 0);
    uint64_t start_ns = loop_now_ns();
    assert_int_equal(ucs_socket_connect(one, (struct sockaddr *)&address), UCS_ERR_TIMED_OUT);
    uint64_t end_ns = loop_now_ns();
    print_message("a connect that nobody answers ended after %u ms\n",
                  (unsigned)((end_ns - start_ns) / NS_PER_MS));
    assert_true(end_ns - start_ns > 300 * NS_PER_MS);
    assert_within("the end of a connect", start_ns, end_ns, 1500);
    close(one);
    one = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    assert_int_equal(ucs_socket_connect(one, (struct sockaddr *)&address), UCS_INPROGRESS);
    close(one);
    for (int i = 0; i < MANY; i++) {
        close(fill[i]);
    }
    close(fd);
}

static void test_options(void **state)
{
    int fd = socket(AF_INET, SOCK_STREAM, 0), on = 1, value = 0;
    socklen_t bytes = sizeof value;
    assert_int_equal(ucs_socket_setopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on), UCS_OK);
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &value, &bytes), 0);
    assert_true(value);
    assert_int_equal(getsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &value, &bytes), 0);
    assert_int_equal(value, 1000);
    assert_int_equal(getsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &value, &bytes), 0);
    assert_true(value);
    close(fd);
    assert_true(ucs_socket_setopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) < 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_ours),
        cmocka_unit_test(test_connect),
        cmocka_unit_test(test_unanswered),
        cmocka_unit_test(test_options),
    };
    lost_watch();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
