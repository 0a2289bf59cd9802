#!/usr/bin/env python3
"""test_check_layers.py SCRIPT: plants one breach of each rule in a small tree and asks the script."""
import os
import shutil
import subprocess
import sys
import tempfile

GOOD = {
    "base/a.h": "int a(void);\n",
    "base/a.c": '#include "base/a.h"\n\n#include <stdio.h>\n\nint a(void)\n{\n    return 1;\n}\n',
    "rpc/b.c": '#include <grpc/grpc.h>\n\n#include "base/a.h"\n#include "proto/x.pb-c.h"\n',
    "tests/rpc/test_b.c": '#include <grpc/grpc.h>\n#include "helper.h"\n#include "engine/e.h"\n',
    "tests/rpc/helper.h": 'const char *url = "http://x"; /* a // inside */\n',
    "engine/e.h": "/* #12 is where this TO" + "DO is kept */\n",
    "decode/d.c": '#include "engine/e.h"\n',
}

# What is added to the good tree, and what the answer must say.
BREACHES = [
    ({"base/c.c": '#include "rpc/b.h"\n'}, 'base/c.c:1: base/ may not include rpc/ ("rpc/b.h")'),
    ({"decode/d.c": '#include "prefill/p.h"\n'}, "decode/ may not include prefill/"),
    ({"base/c.c": '#include "tests/x/helper.h"\n'}, "base/ may not include tests/"),
    ({"router/r.c": '#include "model/weights.h"\n'}, "is closed to router/"),
    ({"engine/f.c": "#include <ucp/api/ucp.h>\n"}, "may be named only in transport/"),
    ({"base/net.c": "#include <event2/event.h>\n"}, "<event2/event.h> may be named only in"),
    ({"tests/rpc/test_c.c": "#include <jansson.h>\n"}, "<jansson.h> may be named only in"),
    ({"decode/d.c": '#include "d.h"\n'}, "write includes from the root"),
    ({"rpc/b.c": '#include "base/a.h"\n', "rpc/b.h": "\n"}, '"rpc/b.h" must be the first include'),
    ({"base/x.h": '#include "base/y.h"\n', "base/y.h": '#include "base/x.h"\n'}, "in a circle"),
    ({"base/c.c": "int x; // no\n"}, "base/c.c:1: a // comment"),
    ({"base/c.c": "typedef struct s {\n    int x;\n} s;\n"}, "typedef of a struct"),
    ({"base/c.c": "/* TO" + "DO: later */\n"}, "work put off"),
    ({"scripts/tool": "# FIX" + "ME\n"}, "scripts/tool:1: work put off"),
    ({"base/c.c": "int x;\n" * 901}, "901 lines, more than 900"),
    ({"base/c.c": "int f(void)\n{\n" + "    f();\n" * 151 + "}\n"}, "a function of 151 lines"),
    ({"newdir/c.c": "int x;\n"}, "newdir/ has no line in the layer matrix"),
]


def ask(script, tree):
    with tempfile.TemporaryDirectory() as root:
        for path, text in tree.items():
            os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
            with open(os.path.join(root, path), "w", encoding="utf-8") as file:
                file.write(text)
        os.makedirs(os.path.join(root, "scripts"), exist_ok=True)
        copy = shutil.copy(script, os.path.join(root, "scripts"))
        done = subprocess.run([sys.executable, copy], stdout=subprocess.PIPE, text=True,
                              env={**os.environ, "GIT_CEILING_DIRECTORIES": os.path.dirname(root)})
        return done.returncode, done.stdout


def main():
    script = sys.argv[1]
    code, out = ask(script, GOOD)
    assert code == 0, out
    code, out = ask(script, {})
    assert code == 1, "an empty tree passed"
    for added, want in BREACHES:
        code, out = ask(script, {**GOOD, **added})
        assert code == 1 and want in out, f"wanted {want!r} of {list(added)}, got:\n{out}"
        assert out.rstrip().split("\n")[-1].startswith("1 breaches"), f"more than asked:\n{out}"
    print(f"{len(BREACHES)} planted breaches found, none where there is none")


main()
