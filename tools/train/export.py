#!/usr/bin/env python3
"""The model directory in the official layout, and back.

    export.py CHECKPOINT.pt DATA OUT        writes OUT (config, two shards with an index, tokenizer, prompt texts); DATA is what prepare.py wrote
    export.py --random SEED DATA OUT        the same shape with random weights, every special value away from its default

FP8 weights as F8_E4M3 with F8_E8M0 scales per 128 x 128 tile, routed experts as I8 (two E2M1 a byte) with F8_E8M0 scales per 32 inputs, the rest BF16,
F32 and I64, in the official tensor names.
"""
import json
import os
import shutil
import struct
import sys

import numpy as np
import torch

import chatformat
import quant
from card import card
from model import CONFIG, Model

SIZE = {'F32': 4, 'BF16': 2, 'F8_E4M3': 1, 'F8_E8M0': 1, 'I8': 1, 'I64': 8}


def bf16_bytes(w):
    return w.float().to(torch.bfloat16).view(torch.int16).cpu().numpy().astype('<i2').tobytes()


def tensors(m):
    """[(official name, dtype, shape, bytes)]"""
    out = []

    def f8(name, w):
        c, e, _ = quant.fp8_codes(w)
        out.append((name + '.weight', 'F8_E4M3', tuple(w.shape), c.to(torch.float8_e4m3fn).view(torch.uint8).cpu().numpy().tobytes()))
        out.append((name + '.scale', 'F8_E8M0', tuple(e.shape), e.to(torch.uint8).cpu().numpy().tobytes()))

    def f4(name, w):
        c, e, _ = quant.mx4_codes(w)
        c = c.flatten(-2).cpu()
        table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
        code = (c.abs()[..., None] == table).int().argmax(-1) + 8 * torch.signbit(c).int()
        packed = (code[..., 0::2] | code[..., 1::2] << 4).to(torch.uint8)
        out.append((name + '.weight', 'I8', tuple(packed.shape), packed.numpy().tobytes()))
        out.append((name + '.scale', 'F8_E8M0', tuple(e.shape), e.to(torch.uint8).cpu().numpy().tobytes()))

    for k, w in m.p.items():
        kind = m.kind[k]
        if kind == 'mx4':
            head, last = k.rsplit('.', 1)
            for e in range(len(w)):
                f4(f'{head}.{e}.{last}', w[e])
        elif kind == 'fp8':
            f8(k[:-len('.weight')], w)
        elif kind == 'bf16':
            out.append((k, 'BF16', tuple(w.shape), bf16_bytes(w)))
        else:
            out.append((k, 'F32', tuple(w.shape), w.float().cpu().numpy().astype('<f4').tobytes()))
    for i, t in m.tid2eid.items():
        out.append((f'layers.{i}.ffn.gate.tid2eid', 'I64', tuple(t.shape), t.cpu().numpy().astype('<i8').tobytes()))
    return out


def write_shard(path, items):
    head, at = {'__metadata__': {'format': 'pt'}}, 0
    for name, dtype, shape, raw in items:
        assert len(raw) == SIZE[dtype] * int(np.prod(shape)), name
        head[name] = {'dtype': dtype, 'shape': list(shape), 'data_offsets': [at, at + len(raw)]}
        at += len(raw)
    text = json.dumps(head, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as f:
        f.write(struct.pack('<Q', len(text)) + text)
        for item in items:
            f.write(item[3])
    return at


def write(m, data, out):
    os.makedirs(out, exist_ok=True)
    items = sorted(tensors(m), key=lambda t: (-SIZE[t[1]], t[0]))                     # wide types first, so that every tensor is aligned
    first = [t for t in items if not t[0].startswith(('layers.3', 'layers.4', 'mtp', 'head', 'norm', 'hc_head'))]
    second = [t for t in items if t not in first]
    total, where = 0, {}
    for n, shard in ((1, first), (2, second)):
        name = f'model-0000{n}-of-00002.safetensors'
        total += write_shard(f'{out}/{name}', shard)
        where.update({t[0]: name for t in shard})
    js = lambda name, x, **k: open(f'{out}/{name}', 'w', encoding='utf-8').write(json.dumps(x, ensure_ascii=False, **k) + '\n')
    js('model.safetensors.index.json', {'metadata': {'total_size': total}, 'weight_map': dict(sorted(where.items()))}, indent=0)
    js('config.json', m.c, indent=2)
    js('generation_config.json', {'_from_model_config': True, 'bos_token_id': 0, 'eos_token_id': 1, 'do_sample': True, 'temperature': 0.6, 'top_p': 0.95, 'transformers_version': '4.57.1'}, indent=2)
    js('encoding.json', chatformat.TEXTS, indent=2)
    token = lambda c: {'__type': 'AddedToken', 'content': c, 'lstrip': False, 'normalized': True, 'rstrip': False, 'single_word': False}
    js('tokenizer_config.json', {'add_bos_token': False, 'add_eos_token': False, 'bos_token': token('<｜begin▁of▁sentence｜>'), 'eos_token': token('<｜end▁of▁sentence｜>'), 'pad_token': token('<｜end▁of▁sentence｜>'),
                                 'clean_up_tokenization_spaces': False, 'model_max_length': 1048576, 'unk_token': None, 'tokenizer_class': 'PreTrainedTokenizerFast'}, indent=2)
    open(f'{out}/MODEL_CARD.md', 'w', encoding='utf-8').write(card())
    shutil.copy(f'{data}/tokenizer.json', f'{out}/tokenizer.json')
    return total


def load(path, device='cpu'):
    """A Model from a directory in the official layout, weights dequantised."""
    m = Model(json.load(open(f'{path}/config.json')), device)
    raw = {}
    for f in sorted(os.listdir(path)):
        if f.endswith('.safetensors'):
            b = open(f'{path}/{f}', 'rb').read()
            n, = struct.unpack('<Q', b[:8])
            for k, v in json.loads(b[8:8 + n]).items():
                if k != '__metadata__':
                    raw[k] = v['dtype'], v['shape'], b[8 + n + v['data_offsets'][0]:8 + n + v['data_offsets'][1]]

    def get(k):
        dt, shape, b = raw[k]
        t = lambda kind: torch.frombuffer(bytearray(b), dtype=kind).reshape(shape)
        if dt == 'F8_E4M3':
            s = get(k[:-len('weight')] + 'scale')
            return t(torch.float8_e4m3fn).float() * s.repeat_interleave(128, 0)[:shape[0]].repeat_interleave(128, 1)[:, :shape[1]]
        if dt == 'F8_E8M0':
            return torch.exp2(t(torch.uint8).float() - 127)
        if dt == 'I8':
            u = t(torch.uint8).int()
            table = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])
            table = torch.cat([table, -table])
            return torch.stack([table[u & 15], table[u >> 4]], -1).flatten(-2) * get(k[:-len('weight')] + 'scale').repeat_interleave(32, 1)
        return t({'F32': torch.float32, 'BF16': torch.bfloat16, 'I64': torch.int64}[dt])
    for k, w in m.p.items():
        if m.kind[k] == 'mx4':
            head, last = k.rsplit('.', 1)
            w.copy_(torch.stack([get(f'{head}.{e}.{last}.weight') for e in range(len(w))]))
        else:
            w.copy_(get(k).float())
    for i in m.tid2eid:
        m.tid2eid[i] = get(f'layers.{i}.ffn.gate.tid2eid').to(device)
    return m


def randomise(m, seed):
    """Random weights of a trained model's size, every special value away from its default."""
    g = torch.Generator().manual_seed(seed)
    for k, w in m.p.items():
        n = lambda std: torch.randn(w.shape, generator=g) * std
        last = k.split('.')[-1]
        if 'norm.weight' in k:
            v = 1 + n(0.2)
        elif k == 'embed.weight':
            v = n(1.0)
        elif last.endswith('_fn'):
            v = n(0.03)
        elif last.endswith(('_base', '_scale', 'attn_sink', 'bias', 'ape')):
            v = n(0.5)
        else:
            v = n(1.5 * w.shape[-1] ** -0.5)
        w.copy_(v)
    for i in m.tid2eid:
        m.tid2eid[i] = torch.stack([torch.randperm(m.c['n_routed_experts'], generator=g)[:m.c['num_experts_per_tok']] for _ in range(m.c['vocab_size'])])
    return m


def main():
    if sys.argv[1] == '--random':
        m, data, out = randomise(Model(CONFIG), int(sys.argv[2])), sys.argv[3], sys.argv[4]
    else:
        ck = torch.load(sys.argv[1], map_location='cpu')
        m, data, out = Model(ck['config']), sys.argv[2], sys.argv[3]
        for k, w in ck['params'].items():
            m.p[k].copy_(w)
        m.tid2eid = {int(i): t for i, t in ck['tid2eid'].items()}
    print(f'{write(m, data, out):,} bytes of tensors in {out}')


if __name__ == '__main__':
    main()
