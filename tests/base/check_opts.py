#!/usr/bin/env python3
"""check_opts.py PROGRAM NAME: what the option table makes for other tools, given to those tools:
bash runs the completion, scdoc and man read the man page. 77 when scdoc is not installed, after
everything else was checked. Works for any program that uses base/opts."""
import re
import shutil
import subprocess
import sys


def run(*args, text=None):
    done = subprocess.run(args, input=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True)
    return done.returncode, done.stdout, done.stderr


def complete(program, script, *words):
    """What bash offers after these words, the last of them unfinished."""
    quoted = " ".join(f"'{w}'" for w in words)
    code, out, error = run("bash", "-c", f"""set -eu
{script}
COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}
_{re.sub('[^a-zA-Z0-9]', '_', program)} || true
printf '%s\\n' "${{COMPREPLY[@]-}}" """)
    assert code == 0 and not error, error
    return out.split()


def main():
    path, name = sys.argv[1:3]
    code, help_text, error = run(path, "--help")
    assert code == 0 and not error, error
    options = sorted(set(re.findall(r"^  --(?:\[no-\])?([a-z0-9-]+)", help_text, re.M)))
    assert {"help", "version", "config"} <= set(options)
    assert run(path, "-h")[1] == help_text
    code, version, _ = run(path, "--version")
    assert code == 0 and version.startswith(name + " ")
    code, out, error = run(path, "--no-such-option-at-all")
    assert code == 2 and not out and error.startswith(f"{name}: unknown option "), error

    code, script, _ = run(path, "--print-completion")
    assert code == 0
    offered = complete(name, script, name, "--")
    assert set(options) <= {o[2:] for o in offered}, (options, offered)
    assert complete(name, script, name, "--hel") == ["--help"]
    assert complete(name, script, name, "--config", "/et") == ["/etc"]
    for option, words in re.findall(r"--(\S+)\)\n +COMPREPLY=\(\$\(compgen -W '([^']*)'", script):
        assert complete(name, script, name, "--" + option, "") == words.split()
        assert complete(name, script, name, "--" + option, "=") == words.split()
        one = words.split()[0]
        assert one in complete(name, script, name, "--" + option, "=", one[:2])

    code, source, _ = run(path, "--print-man")
    assert code == 0
    if shutil.which("scdoc") is None:
        print("scdoc is not installed")
        sys.exit(77)
    code, roff, error = run("scdoc", text=source)
    assert code == 0, f"scdoc: {error}"
    # Each option once as a heading of its paragraph, with its name in bold and hyphens kept.
    plain = roff.replace("\\-", "-").replace("\\&", "")
    for option in options:
        assert re.search(rf"^\\fB--{option}\\fR", plain, re.M), f"--{option} is not in the page"
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS"):
        assert f".SH {heading}" in roff
    print(f"{len(options)} options in help, completion and man page")


main()
