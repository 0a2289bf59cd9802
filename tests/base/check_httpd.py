"""Clients that others wrote against our server: Python's http.client, and curl where it is.

usage: check_httpd.py SERVER_PROGRAM
"""
import http.client
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time

server = subprocess.Popen([sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
port = int(server.stdout.readline())


def check(what, found, wanted):
    if found != wanted:
        sys.exit(f"{what}: found {found!r:.300}, wanted {wanted!r:.300}")


body = os.urandom(1_000_000)

# http.client: one connection for all, so each answer must end exactly where it says
connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
connection.connect()
first_socket = connection.sock
connection.request("GET", "/hello")
response = connection.getresponse()
check("hello", (response.status, response.read()), (200, b"hello"))
connection.request("HEAD", "/hello")
response = connection.getresponse()
check("head", (response.status, response.getheader("content-length"), response.read()), (200, "5", b""))
connection.request("POST", "/echo", body=body)
check("plain body", connection.getresponse().read() == body, True)
pieces = [body[i:i + 7919] for i in range(0, len(body), 7919)]
connection.request("POST", "/echo", body=iter(pieces), encode_chunked=True,
                   headers={"Transfer-Encoding": "chunked"})
check("chunked body", connection.getresponse().read() == body, True)
connection.request("POST", "/echo", body=iter([b"x"] * 3000), encode_chunked=True,
                   headers={"Transfer-Encoding": "chunked"})
check("chunks of one byte", connection.getresponse().read(), b"x" * 3000)
connection.request("GET", "/whole")
response = connection.getresponse()
check("stream", response.read(), b"data: 1\n\ndata: 2\n\n")
connection.request("GET", "/nothing")
response = connection.getresponse()
check("unknown", (response.status, response.getheader("content-type")), (404, "application/json"))
response.read()
check("one connection", connection.sock is first_socket, True)
connection.request("GET", "/cut")
response = connection.getresponse()
try:
    found = response.read()
    sys.exit(f"a cut stream passed for whole: {found!r}")
except http.client.IncompleteRead:
    pass

# the same on 1.0, where only a reset can tell
old = socket.create_connection(("127.0.0.1", port), timeout=10)
old.sendall(b"GET /cut HTTP/1.0\r\n\r\n")
time.sleep(0.7)
text = b""
try:
    while True:
        piece = old.recv(65536)
        if not piece:
            sys.exit("a cut 1.0 stream passed for whole")
        text += piece
except ConnectionResetError:
    check("1.0 text before the reset", text.endswith(b"data: 2\n\n"), True)

curl = shutil.which("curl")
if curl:
    with tempfile.NamedTemporaryFile() as file:
        file.write(body)
        file.flush()
        url = f"http://127.0.0.1:{port}"

        def run(*arguments):
            return subprocess.run([curl, "-sS", *arguments], capture_output=True, timeout=20)

        for header in ("Transfer-Encoding: chunked", "Expect: 100-continue", "Expect:"):
            done = run("-v", "-H", header, "--data-binary", "@" + file.name, url + "/echo")
            check(f"curl {header}", (done.returncode, done.stdout == body), (0, True))
            # curl gives up on a 100 that does not come within a second, and says so
            check(f"curl {header} had its 100", b"Done waiting for 100-continue" in done.stderr, False)
        check("curl whole", run("-N", url + "/whole").returncode, 0)
        check("curl cut", run("-N", url + "/cut").returncode in (18, 56), True)
        check("curl head", run("-I", url + "/hello").returncode, 0)
        check("curl 1.0", run("-0", url + "/hello").stdout, b"hello")
        check("curl proxy form", run("-x", f"127.0.0.1:{port}", "http://other/hello").stdout, b"hello")
        check("curl upgrade", run("--http2", url + "/hello").stdout, b"hello")
else:
    print("curl is not here: not tried")

server.stdin.close()
check("exit", server.wait(10), 0)
