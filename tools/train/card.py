"""The model card: what the model is, every text source with its licence, what it was taught."""
from sources import PACKAGES

WORDNET = '''WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved.

THIS SOFTWARE AND DATABASE IS PROVIDED "AS IS" AND PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES, EXPRESS OR IMPLIED.  BY WAY OF EXAMPLE,
BUT NOT LIMITATION, PRINCETON UNIVERSITY MAKES NO REPRESENTATIONS OR WARRANTIES OF MERCHANTABILITY OR FITNESS FOR ANY PARTICULAR PURPOSE OR THAT THE USE
OF THE LICENSED SOFTWARE, DATABASE OR DOCUMENTATION WILL NOT INFRINGE ANY THIRD PARTY PATENTS, COPYRIGHTS, TRADEMARKS OR OTHER RIGHTS.

Permission to use, copy, modify and distribute this software and database and its documentation for any purpose and without fee or royalty is hereby
granted, provided that you agree to comply with this copyright notice and statements, including the disclaimer, and that the same appear on ALL copies of
the software, database and documentation, including modifications that you make for internal use or for distribution.

The name of Princeton University or Princeton may not be used in advertising or publicity pertaining to distribution of the software and/or database.
Title to copyright in this software, database and any associated documentation shall at all times remain with Princeton University and LICENSEE agrees to
preserve same.'''


def card():
    rows = '\n'.join(f'| {n} | {o} | {what} | {lic} |' for n, o, lic, what in PACKAGES)
    return f'''# baton-tiny

A small DeepSeek-V4 in the official checkpoint layout, made for baton's quickstart and tests. 13.4 million parameters, 15.3 MB: FP8 E4M3 with E8M0 scales,
MXFP4 experts, BF16, F32. Five layers (window, window, ratio 4, ratio 128, ratio 4), four mHC streams, 8 experts of which 3 are used and a shared one, an
indexer that keeps 64 compressed entries, an MTP block, and a byte-level BPE of 2,560 ids with DeepSeek's splits and special tokens. Every width that a
kernel cares about is the real model's.

It is no product of DeepSeek, and it holds none of DeepSeek's weights: it was trained from random numbers by `tools/train`.

## What it does

It continues plain English in the manner of its books and manuals, without knowing what it says. It follows the chat encoding, with and without
thinking, and ends its replies by itself. It was taught things whose answers can be checked: repeating a text, also from far back in a long prompt;
counting; sums of two numbers (poorly); sorting and picking from lists; looking up facts, tables and notes in the prompt; short definitions; calling one of
the listed tools; short stories from templates. `docs/tiny_model.md` has the measurements. Its statements about the world are not to be relied on.

A passage to be repeated stands on lines of its own behind its name, and a blank line ends it; after any text of up to some thousand tokens it is asked for by that
name, in a user's turn:

    Note for Paul:
    The blue lamp is behind the door. Anna must pay 40 coins to Peter before Monday.

    ... two thousand tokens of anything ...

    Repeat the note for Paul.

Other wordings were not taught, and mostly fail. What it is weakest at: prose of its own, which repeats itself after a sentence or two, sums, and any knowledge.

## Text

All of it is in the public domain or under a permissive licence, fetched by package name. Parts were held out for measuring: Persuasion, the Gospel of Mark, a
tenth of Andersen, the end of every other text.

| package | from | text | licence |
|---|---|---|---|
{rows}

Tasks and stories come from the templates in `tools/train/tasks.py` and `stories.py`.

"World English Bible" is a trademark; the text was cut and rearranged, and what this model writes is not that text.

## Notice

{WORDNET}
'''
