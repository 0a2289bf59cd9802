#!/usr/bin/env python3
"""Compare exact arithmetic with HF transformers' DeepseekV4ForCausalLM in float32, on random models of different shape.

usage: compare_hf.py BATON_EVAL [--models 8] [--first-seed 0] [--tokens 70]

Each model is written as an official-layout checkpoint (fp32 and bf16 by turns), given to HF as arrays and to baton-eval as a
folder. Three ways to the same logits: a prompt in one piece, in pieces of 7 followed by single tokens, and token by token.
The limit is 2e-4 of the range of the logits. Needs torch and transformers 5.17.
"""
import argparse
import sys
import tempfile

import interpreter

interpreter.need('numpy', 'torch', 'transformers')

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

import engine
import make_checkpoint
import refnp


def hf_config(c):
    kinds = {0: 'sliding_attention', c.r4: 'compressed_sparse_attention', c.r128: 'heavily_compressed_attention'}
    arguments = dict(
        vocab_size=c.V, hidden_size=c.D, num_hidden_layers=c.nl, num_attention_heads=c.nh, num_key_value_heads=1, head_dim=c.hd, qk_rope_head_dim=c.rd,
        q_lora_rank=c.ql, o_groups=c.og, o_lora_rank=c.ol, n_routed_experts=c.ne, n_shared_experts=1, num_experts_per_tok=c.topk,
        moe_intermediate_size=c.inter, sliding_window=c.win, hc_mult=c.hc, hc_sinkhorn_iters=c.iters, index_n_heads=c.inh, index_head_dim=c.ihd,
        index_topk=c.itopk, routed_scaling_factor=c.rscale, swiglu_limit=c.lim or 1e30, num_nextn_predict_layers=0, max_position_embeddings=65536,
        rope_theta=c.theta, compress_rope_theta=c.ctheta, layer_types=[kinds[r] for r in c.ratios],
        mlp_layer_types=['hash_moe'] * c.nhash + ['moe'] * (c.nl - c.nhash),
        compress_rates={'compressed_sparse_attention': c.r4, 'heavily_compressed_attention': c.r128})
    if c.yarn:
        arguments['rope_scaling'] = {'type': 'yarn', 'factor': c.factor, 'original_max_position_embeddings': c.orig, 'beta_fast': c.bfast, 'beta_slow': c.bslow}
    config = DeepseekV4Config(**arguments)
    config._attn_implementation = 'eager'
    return config


def hf_names(c, P):
    """(array, name in HF) of every weight."""
    yield P['embed'], 'model.embed_tokens.weight'
    yield P['head'], 'lm_head.weight'
    yield P['norm'], 'model.norm.weight'
    for part in ('fn', 'base', 'scale'):
        yield P['hc_head_' + part], 'model.hc_head.hc_' + part
    for i in range(c.nl):
        here, there = 'layers.%d.' % i, 'model.layers.%d.' % i
        for ours, theirs in (('hc_attn', 'attn_hc'), ('hc_ffn', 'ffn_hc')):
            for part in ('fn', 'base', 'scale'):
                yield P[here + ours + '_' + part], there + theirs + '.' + part
        yield P[here + 'attn_norm'], there + 'input_layernorm.weight'
        yield P[here + 'ffn_norm'], there + 'post_attention_layernorm.weight'
        a, b = here + 'attn.', there + 'self_attn.'
        yield P[a + 'sink'], b + 'sinks'
        for ours, theirs in (('wq_a', 'q_a_proj'), ('q_norm', 'q_a_norm'), ('wq_b', 'q_b_proj'), ('wkv', 'kv_proj'), ('kv_norm', 'kv_norm'),
                             ('wo_a', 'o_a_proj'), ('wo_b', 'o_b_proj')):
            yield P[a + ours], b + theirs + '.weight'
        compressors = [('compressor.', 'compressor.')] * bool(c.ratios[i]) + [('indexer.compressor.', 'compressor.indexer.')] * (c.ratios[i] == c.r4)
        for ours, theirs in compressors:
            for part, name in (('wkv', 'kv_proj.weight'), ('wgate', 'gate_proj.weight'), ('ape', 'position_bias'), ('norm', 'kv_norm.weight')):
                yield P[a + ours + part], b + theirs + name
        if c.ratios[i] == c.r4:
            yield P[a + 'indexer.wq_b'], b + 'compressor.indexer.q_b_proj.weight'
            yield P[a + 'indexer.weights_proj'], b + 'compressor.indexer.scorer.weights_proj.weight'
        f, g = here + 'ffn.', there + 'mlp.'
        yield P[f + 'gate'], g + 'gate.weight'
        if i < c.nhash:
            yield P[f + 'tid2eid'], g + 'gate.tid2eid'
        else:
            yield P[f + 'bias'], g + 'gate.e_score_correction_bias'
        yield np.concatenate([P[f + 'w1'], P[f + 'w3']], 1), g + 'experts.gate_up_proj'
        yield P[f + 'w2'], g + 'experts.down_proj'
        for ours, theirs in (('sw1', 'gate_proj'), ('sw3', 'up_proj'), ('sw2', 'down_proj')):
            yield P[f + ours], g + 'shared_experts.' + theirs + '.weight'


def hf_logits(c, P, ids):
    model = DeepseekV4ForCausalLM(hf_config(c)).float().eval()
    slots = dict(model.named_parameters()) | dict(model.named_buffers())
    unset = {name for name in slots if 'inv_freq' not in name}
    for array, name in hf_names(c, P):
        value = torch.as_tensor(np.asarray(array))
        if tuple(value.shape) != tuple(slots[name].shape):
            raise SystemExit('%s has shape %s in HF and %s here' % (name, tuple(slots[name].shape), tuple(value.shape)))
        slots[name].data.copy_(value.to(slots[name].dtype))
        unset.discard(name)
    if unset:
        raise SystemExit('HF has weights that were not set: %s' % sorted(unset))
    with torch.no_grad():
        return model(torch.as_tensor(ids)[None], use_cache=False).logits[0].double().numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('eval')
    parser.add_argument('--models', type=int, default=8)
    parser.add_argument('--first-seed', type=int, default=0)
    parser.add_argument('--tokens', type=int, default=70)
    args = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(args.first_seed, args.first_seed + args.models):
        c, rng = make_checkpoint.shape(seed), np.random.default_rng(seed)
        kind = ('f32', 'bf16')[seed % 2]
        with tempfile.TemporaryDirectory() as directory:
            P = make_checkpoint.write(directory, c, refnp.randparams(c, rng), kind)
            ids = rng.integers(0, c.V, args.tokens)
            want = hf_logits(c, P, ids)
            limit = 2e-4 * np.ptp(want)
            whole = engine.logits(args.eval, directory, [(ids[:n], []) for n in range(1, len(ids) + 1)], exact=True)
            cut = len(ids) * 2 // 3
            pieces, steps = engine.logits(args.eval, directory, [(ids[:cut], ids[cut:]), (ids[:1], ids[1:])], exact=True, chunk=7)
        errors = (abs(np.concatenate(whole) - want).max(), abs(pieces - want[cut - 1:]).max(), abs(steps - want).max())
        same = np.array_equal(np.concatenate(whole), steps) and np.array_equal(pieces, steps[cut - 1:])
        ok = max(errors) <= limit and same
        failed += not ok
        print('%s seed %d %-4s ratios %s heads %d x %d, %d experts: error %.1e of %.1f (limit %.1e); prefill and steps %s' % (
            'ok  ' if ok else 'FAIL', seed, kind, c.ratios, c.nh, c.hd, c.ne, max(errors), np.ptp(want), limit, 'identical' if same else 'DIFFER'), flush=True)
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
