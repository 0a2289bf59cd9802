"""baton-eval as a function: requests in, arrays of logits out."""
import json
import subprocess

import numpy as np


def logits(binary, model, requests, exact=False, chunk=512, device='cpu', threads=0):
    """requests: [(tokens, forced)]; returns for each an array [1 + len(forced), vocabulary]."""
    lines = ''.join(json.dumps({'tokens': [int(t) for t in tokens], 'forced': [int(t) for t in forced]}) + '\n' for tokens, forced in requests)
    command = [binary, 'logits', '--model', model, '--chunk', str(chunk), '--device', device, '--threads', str(threads)] + ['--exact'] * exact
    done = subprocess.run(command, input=lines, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit('%s failed: %s' % (' '.join(command), done.stderr))
    rows = [np.array(json.loads(line)['logits']) for line in done.stdout.splitlines()]
    out, at = [], 0
    for _, forced in requests:
        out.append(np.array(rows[at:at + 1 + len(forced)]))
        at += 1 + len(forced)
    assert at == len(rows)
    return out
