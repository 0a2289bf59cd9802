#!/usr/bin/env python3
"""The loss curves of log.json as a picture: plot.py LOG.json OUT.png (needs matplotlib)"""
import json
import sys

import matplotlib
matplotlib.use('Agg')
import matplotlib.pyplot as plt

log = json.load(open(sys.argv[1]))
rows = log['rows']
x = [r[0] * log['tokens_per_step'] / 1e6 for r in rows]
fig, (a, b) = plt.subplots(2, 1, figsize=(9, 6.5), sharex=True, gridspec_kw={'height_ratios': [3, 1]})
a.plot(x, [r[2] for r in rows], color='#c77', lw=.9, label='MTP block: the token after the next')
a.plot(x, [r[1] for r in rows], color='#246', lw=1.1, label='next token')
a.set_ylim(.5, 5)
a.set_ylabel('cross-entropy, nats a token')
b.plot([q for q, r in zip(x, rows) if r[3]], [r[3] for r in rows if r[3]], color='#484', lw=1, label='indexer: KL to the attention it predicts')
b.set_ylim(0.08, 0.2)
b.set_ylabel('nats')
b.set_xlabel('million tokens')
places = [(next((q for q, r in zip(x, rows) if r[5] >= part), None), what) for part, what in
          ((.05, 'indexer learns'), (.40, 'rows of 2,304'), (.50, 'step size falls, top-k on'), (.70, 'rows of 4,608, quantisers on'))]
for at, what in places:
    if at is not None:
        for ax in (a, b):
            ax.axvline(at, color='#bbb', lw=.8, ls=':')
        a.text(at, 4.95, ' ' + what, rotation=90, va='top', ha='left', fontsize=8, color='#666')
a.legend(loc='center right', fontsize=9)
b.legend(loc='upper right', fontsize=9)
for ax in (a, b):
    ax.spines[['top', 'right']].set_visible(False)
fig.tight_layout()
fig.savefig(sys.argv[2], dpi=100)
