/* Addresses and listeners. Ports are always the kernel's choice, so runs can't collide. */
#include "base/net.h"

#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>

#include <cmocka.h>

static void test_parse(void **state)
{
    static const struct {
        const char *text, *host;
        int port; /* -1: none */
    } good[] = {
        {"localhost", "localhost", -1},
        {"localhost:8000", "localhost", 8000},
        {"0.0.0.0:0", "0.0.0.0", 0},
        {"::1", "::1", -1},
        {"[::1]", "::1", -1},
        {"[::1]:8000", "::1", 8000},
        {"[fe80::1%eth0]:65535", "fe80::1%eth0", 65535},
        {"::", "::", -1},
        {":8000", "", 8000},
        {"", "", -1},
    };
    static const char *const bad[] = {
        "[::1", "[::1]8000", "host:", "host:65536", "host:80x", "host:-1", "ho st:80", "http://x",
    };
    struct net_address address;
    struct error err;

    for (size_t i = 0; i < sizeof(good) / sizeof(*good); i++) {
        assert_int_equal(net_address_parse(good[i].text, &address, &err), STATUS_OK);
        assert_string_equal(address.host, good[i].host);
        assert_int_equal(address.has_port, good[i].port >= 0);
        assert_int_equal(address.port, good[i].port < 0 ? 0 : good[i].port);
    }
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        err.text[0] = '\0';
        assert_int_equal(net_address_parse(bad[i], &address, &err), STATUS_INVALID);
        assert_non_null(strstr(err.text, bad[i]));
    }
}

static void test_format(void **state)
{
    char text[NET_HOST_MAX + 16];

    net_address_format("127.0.0.1", 80, text, sizeof(text));
    assert_string_equal(text, "127.0.0.1:80");
    net_address_format("::1", 80, text, sizeof(text));
    assert_string_equal(text, "[::1]:80");
    net_address_format("fe80::1%eth0", 80, text, sizeof(text));
    assert_string_equal(text, "[fe80::1%25eth0]:80");
}

static void test_kinds_of_host(void **state)
{
    assert_true(net_host_is_wildcard(""));
    assert_true(net_host_is_wildcard("0.0.0.0"));
    assert_true(net_host_is_wildcard("::"));
    assert_true(net_host_is_wildcard("0:0:0:0:0:0:0:0"));
    assert_false(net_host_is_wildcard("127.0.0.1"));
    assert_true(net_host_is_loopback("127.8.9.1"));
    assert_true(net_host_is_loopback("::1"));
    assert_true(net_host_is_loopback("localhost"));
    assert_false(net_host_is_loopback("128.0.0.1"));
    assert_false(net_host_is_loopback("::"));
}

static bool connects(int family, const char *host, uint16_t port)
{
    int fd = socket(family, SOCK_STREAM, 0);
    int rc = -1;

    if (family == AF_INET) {
        struct sockaddr_in sin = {.sin_family = AF_INET, .sin_port = htons(port)};

        inet_pton(AF_INET, host, &sin.sin_addr);
        rc = connect(fd, (struct sockaddr *)&sin, sizeof(sin));
    } else {
        struct sockaddr_in6 sin6 = {.sin6_family = AF_INET6, .sin6_port = htons(port)};

        inet_pton(AF_INET6, host, &sin6.sin6_addr);
        rc = connect(fd, (struct sockaddr *)&sin6, sizeof(sin6));
    }
    close(fd);
    return rc == 0;
}

static bool have_v6(void)
{
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    bool ok = fd >= 0 && bind(fd, (struct sockaddr *)&any, sizeof(any)) == 0;

    if (fd >= 0) {
        close(fd);
    }
    return ok;
}

static void test_listen_each_family(void **state)
{
    static const struct {
        const char *host;
        bool v4, v6, needs_v6;
    } cases[] = {
        {"127.0.0.1", true, false, false},
        {"0.0.0.0", true, false, false},
        {"", true, true, true},
        {"::", true, true, true},
        {"::1", false, true, true},
        {"[::1]", false, true, true},
    };
    bool v6 = have_v6();

    for (size_t i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
        struct error err;
        uint16_t port = 0;
        int fd = -1;

        if (cases[i].needs_v6 && !v6) {
            continue;
        }
        assert_int_equal(net_listen(cases[i].host, 0, 16, &fd, &port, &err), STATUS_OK);
        assert_int_not_equal(port, 0);
        assert_int_equal(connects(AF_INET, "127.0.0.1", port), cases[i].v4);
        assert_int_equal(connects(AF_INET6, "::1", port), cases[i].v6);
        close(fd);
    }
}

static void test_second_listener_is_refused(void **state)
{
    static const char *const again[] = {"127.0.0.1", "0.0.0.0", ""};
    struct error err;
    uint16_t port = 0;
    uint16_t other = 0;
    char wanted[64];
    int fd = -1;
    int second = -1;

    assert_int_equal(net_listen("127.0.0.1", 0, 16, &fd, &port, &err), STATUS_OK);
    for (size_t i = 0; i < sizeof(again) / sizeof(*again); i++) {
        err.text[0] = '\0';
        assert_int_equal(net_listen(again[i], port, 16, &second, &other, &err), STATUS_EXISTS);
        snprintf(wanted, sizeof(wanted), "port %u is taken", port);
        assert_non_null(strstr(err.text, wanted));
        snprintf(wanted, sizeof(wanted), "pid %d (", getpid());
        assert_non_null(strstr(err.text, wanted));
        assert_int_equal(second, -1);
    }
    close(fd);
    assert_false(net_port_holder(port, wanted, sizeof(wanted)));
    assert_string_equal(wanted, "");
}

static void test_unknown_name(void **state)
{
    struct error err;
    uint16_t port = 0;
    int fd = -1;

    assert_int_equal(net_listen("name.invalid", 0, 16, &fd, &port, &err), STATUS_NOT_FOUND);
    assert_non_null(strstr(err.text, "name.invalid"));
    assert_int_equal(net_listen("[::1", 0, 16, &fd, &port, &err), STATUS_INVALID);
    assert_int_equal(net_listen("192.0.2.1", 0, 16, &fd, &port, &err), STATUS_SYSTEM);
    assert_int_equal(fd, -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_parse),
        cmocka_unit_test(test_format),
        cmocka_unit_test(test_kinds_of_host),
        cmocka_unit_test(test_listen_each_family),
        cmocka_unit_test(test_second_listener_is_refused),
        cmocka_unit_test(test_unknown_name),
    };

    return cmocka_run_group_tests(tests, NULL, NULL) ? 1 : 0;
}
