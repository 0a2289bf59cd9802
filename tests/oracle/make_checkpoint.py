#!/usr/bin/env python3
"""Random checkpoints in the official layout, and the same weights as arrays.

usage: make_checkpoint.py DIR SEED {f32|bf16|fp8|nvfp4}     writes one, e.g. to look at

`shape(seed)` draws a configuration (refnp.Cfg) that differs from others in every size and in the order of its layers;
`randparams` (refnp.py) its weights. fp8 means FP8 blocks and MXFP4 experts, as the official files have; nvfp4 replaces
those experts' format. What `write` returns are the weights as stored, dequantised, under refnp's names.
"""
import json
import os
import struct
import sys

import numpy as np

import refnp


def shape(seed, quantised=False, one_layer=None):
    """one_layer: the only ratio. quantised: sizes that FP8 groups and packed entries can have."""
    rng = np.random.default_rng(1000 + seed)
    pick = lambda *values: values[int(rng.integers(len(values)))]
    c = refnp.tiny()
    c.V, c.nh, c.og = pick(96, 101, 160), pick(4, 8), pick(1, 2, 4)
    c.ne, c.topk = pick(6, 8, 12), pick(2, 3)
    c.inh, c.itopk, c.rscale = 16, pick(3, 5), pick(1.5, 2.5)
    c.win, c.iters, c.lim = pick(5, 8, 16), pick(3, 20), pick(0.0, 0.5, 1.0)
    c.r128 = pick(8, 16, 32)
    if quantised:
        c.D, c.ql, c.ol, c.inter = pick(128, 256), 128, pick(128, 256), pick(128, 256)
        c.rd, c.hd, c.ihd = 64, pick(128, 192, 512), pick(64, 128)
        c.r128, c.win = 128, pick(32, 128)
        c.lim = 10.0
    else:
        c.D, c.ql, c.ol, c.inter = pick(40, 48, 72), pick(20, 24, 33), pick(10, 12, 17), pick(24, 40, 56)
        c.rd, c.ihd = pick(8, 16), pick(16, 32)
        c.hd = c.rd + pick(8, 16, 24)
    c.orig, c.factor = pick(64, 256), pick(4.0, 16.0)
    c.yarn = bool(rng.integers(4))
    kinds = [0, c.r4, c.r128]
    c.ratios = [one_layer] if one_layer is not None else [0, c.r4, c.r128] + [pick(*kinds) for _ in range(int(rng.integers(3)))]
    if one_layer is None:
        rng.shuffle(c.ratios)
        c.ratios = [int(r) for r in c.ratios]
    c.nl = len(c.ratios)
    c.nhash = int(rng.integers(min(c.nl, 3) + 1)) if one_layer is None else int(rng.integers(2))
    if not c.yarn:
        c.factor = 1.0
    return c


def config_json(c, kind):
    config = {
        'architectures': ['DeepseekV4ForCausalLM'], 'model_type': 'deepseek_v4', 'hidden_size': c.D, 'num_hidden_layers': c.nl,
        'num_attention_heads': c.nh, 'num_key_value_heads': 1, 'head_dim': c.hd, 'qk_rope_head_dim': c.rd, 'q_lora_rank': c.ql,
        'o_groups': c.og, 'o_lora_rank': c.ol, 'sliding_window': c.win, 'compress_ratios': c.ratios, 'index_n_heads': c.inh,
        'index_head_dim': c.ihd, 'index_topk': c.itopk, 'n_routed_experts': c.ne, 'num_experts_per_tok': c.topk, 'n_shared_experts': 1,
        'moe_intermediate_size': c.inter, 'scoring_func': 'sqrtsoftplus', 'topk_method': 'noaux_tc', 'norm_topk_prob': True,
        'routed_scaling_factor': c.rscale, 'num_hash_layers': c.nhash, 'hc_mult': c.hc, 'hc_sinkhorn_iters': c.iters, 'hc_eps': c.hceps,
        'swiglu_limit': c.lim, 'hidden_act': 'silu', 'rms_norm_eps': c.eps, 'vocab_size': c.V, 'num_nextn_predict_layers': 0,
        'max_position_embeddings': 65536, 'rope_theta': c.theta, 'compress_rope_theta': c.ctheta, 'bos_token_id': 0, 'eos_token_id': 1,
        'tie_word_embeddings': False, 'attention_bias': False, 'torch_dtype': 'float32' if kind == 'f32' else 'bfloat16'}
    if c.yarn:
        config['rope_scaling'] = {'type': 'yarn', 'factor': c.factor, 'original_max_position_embeddings': c.orig, 'beta_fast': c.bfast, 'beta_slow': c.bslow}
    if kind in ('fp8', 'nvfp4'):
        config['quantization_config'] = {'quant_method': 'fp8', 'fmt': 'e4m3', 'scale_fmt': 'ue8m0', 'activation_scheme': 'dynamic', 'weight_block_size': [128, 128]}
        config['expert_dtype'] = 'fp4'
    if kind == 'nvfp4':
        config['quantization_config'] |= {'quant_algo': 'MIXED_PRECISION', 'moe_quant_algo': 'NVFP4', 'group_size': 16}
    return config


# ------------------------------------------------------------------------------------------------------------- formats

E4M3 = np.array([m * 2.0 ** -9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])
E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])


def codes(table, x, sign):
    """Nearest entry's index, with the sign bit."""
    middle = (table[1:] + table[:-1]) / 2
    return (np.searchsorted(middle, np.abs(x)) | np.where(x < 0, sign, 0)).astype(np.uint8)


def values(table, code, sign):
    return table[code & (sign - 1)] * np.where(code & sign, -1, 1)


def bf16_bits(x):
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16)


def bf16(x):
    return (bf16_bits(x).astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def spread(x, rows, cols):
    return np.repeat(np.repeat(x, rows, 0), cols, 1)


class Writer:
    def __init__(self):
        self.tensors = {}

    def put(self, name, dtype, array):
        self.tensors[name] = (dtype, list(array.shape), np.ascontiguousarray(array).tobytes())

    def f32(self, name, x):
        self.put(name, 'F32', x.astype('<f4'))
        return x.astype(np.float32).astype(np.float64)

    def bf16(self, name, x):
        self.put(name, 'BF16', bf16_bits(x))
        return bf16(x)

    def fp8(self, stem, w):
        o, i = w.shape
        pad = np.zeros((-(-o // 128) * 128, -(-i // 128) * 128))
        pad[:o, :i] = w
        top = np.abs(pad).reshape(pad.shape[0] // 128, 128, -1, 128).max((1, 3))
        exponent = np.ceil(np.log2(np.maximum(top, 1e-30) / 448)).astype(int)
        scale = spread(2.0 ** exponent, 128, 128)[:o, :i]
        code = codes(E4M3, w / scale, 128)
        self.put(stem + 'weight', 'F8_E4M3', code)
        self.put(stem + 'scale', 'F8_E8M0', (exponent + 127).astype(np.uint8))
        return values(E4M3, code, 128) * scale

    def nibbles(self, code):
        return code[:, 0::2] | code[:, 1::2] << 4

    def mxfp4(self, stem, w):
        top = np.abs(w).reshape(w.shape[0], -1, 32).max(2)
        exponent = np.ceil(np.log2(np.maximum(top, 1e-30) / 6)).astype(int)
        scale = spread(2.0 ** exponent, 1, 32)
        code = codes(E2M1, w / scale, 8)
        self.put(stem + 'weight', 'I8', self.nibbles(code).view(np.int8))
        self.put(stem + 'scale', 'F8_E8M0', (exponent + 127).astype(np.uint8))
        return values(E2M1, code, 8) * scale

    def nvfp4(self, stem, w):
        whole = float(np.float32(np.abs(w).max() / (448 * 6) * 1.37))  # a factor that is no power of two
        top = np.abs(w).reshape(w.shape[0], -1, 16).max(2)
        scale_code = codes(E4M3, np.clip(top / 6 / whole, 2.0 ** -9, 448), 128)
        scale = spread(values(E4M3, scale_code, 128), 1, 16)
        code = codes(E2M1, w / (scale * whole), 8)
        self.put(stem + 'weight', 'U8', self.nibbles(code))
        self.put(stem + 'weight_scale', 'F8_E4M3', scale_code)
        self.put(stem + 'weight_scale_2', 'F32', np.array(whole, '<f4'))
        self.put(stem + 'input_scale', 'F32', np.array(0.01, '<f4'))
        return values(E2M1, code, 8) * scale * whole

    def save(self, directory, config):
        os.makedirs(directory, exist_ok=True)
        head, at = {}, 0
        for name, (dtype, dims, data) in self.tensors.items():
            head[name] = {'dtype': dtype, 'shape': dims, 'data_offsets': [at, at + len(data)]}
            at += len(data)
        text = json.dumps(head).encode()
        text += b' ' * (-len(text) % 8)
        with open(os.path.join(directory, 'model.safetensors'), 'wb') as f:
            f.write(struct.pack('<Q', len(text)) + text)
            for _, _, data in self.tensors.values():
                f.write(data)
        with open(os.path.join(directory, 'config.json'), 'w') as f:
            json.dump(config, f)


def write(directory, c, P, kind):
    """Writes the checkpoint; returns P as the file has it."""
    w, Q = Writer(), {}
    plain = w.f32 if kind == 'f32' else w.bf16
    matrix = (lambda stem, x: w.fp8(stem, x)) if kind in ('fp8', 'nvfp4') else (lambda stem, x: plain(stem + 'weight', x))
    expert = {'fp8': w.mxfp4, 'nvfp4': w.nvfp4}.get(kind, matrix)
    for name, x in P.items():
        last = name.split('.')[-1]
        stem = name[:len(name) - len(last)]
        if name in ('embed', 'head', 'norm') or last in ('attn_norm', 'ffn_norm', 'q_norm', 'kv_norm', 'norm', 'gate', 'weights_proj') or (
                'compressor' in name and last in ('wkv', 'wgate')):
            Q[name] = plain(name + '.weight', x)
        elif last in ('wq_a', 'wq_b', 'wkv', 'wo_a', 'wo_b'):
            Q[name] = matrix(name + '.', x)
        elif last == 'sink':
            Q[name] = w.f32(stem + 'attn_sink', x)
        elif last == 'bias':
            Q[name] = w.f32(stem + 'gate.bias', x)
        elif last == 'tid2eid':
            w.put(stem + 'gate.tid2eid', 'I64', x.astype('<i8'))
            Q[name] = x
        elif last in ('w1', 'w2', 'w3'):
            Q[name] = np.array([expert('%sexperts.%d.%s.' % (stem, e, last), x[e]) for e in range(c.ne)])
        elif last in ('sw1', 'sw2', 'sw3'):
            Q[name] = matrix('%sshared_experts.%s.' % (stem, last[1:]), x)
        else:
            Q[name] = w.f32(name, x)
    w.save(directory, config_json(c, kind))
    return Q


def rough(c, P, rng):
    """Rows whose magnitudes differ by 2^10 and more: a wrong group of a quantiser shows nowhere else. The weights behind a
    small group are as much larger, so that what it holds matters."""
    for name in P:
        if name.endswith(('attn_norm', 'ffn_norm', 'q_norm', 'kv_norm')):
            P[name] = P[name] * 2.0 ** rng.integers(-3, 4, P[name].shape)
    for i in range(c.nl):
        here = 'layers.%d.' % i
        for norm, readers in (('attn_norm', ('attn.wq_a', 'attn.wkv', 'compressor.wkv', 'compressor.wgate', 'weights_proj')),
                              ('ffn_norm', ('ffn.w1', 'ffn.w3', 'ffn.sw1', 'ffn.sw3', 'ffn.gate'))):
            factor = 2.0 ** (-14 * (np.arange(c.D) // 128))
            P[here + norm] = P[here + norm] * factor
            for name in P:
                if name.startswith(here) and name.endswith(readers):
                    P[name] = P[name] / factor
    return P


if __name__ == '__main__':
    directory, seed, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    config = shape(seed, kind in ('fp8', 'nvfp4'))
    write(directory, config, refnp.randparams(config, np.random.default_rng(seed)), kind)
