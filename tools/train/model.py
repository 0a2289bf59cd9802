"""DeepSeek-V4 in PyTorch, whole-sequence form, for training and as the reference of the bundled model.

One set of equations serves three kinds of arithmetic, chosen by `Mode`:
    exact    float32, no quantiser                                   Mode()
    train    bfloat16 tensors, quantisers off or on                  Mode(half=True), Mode(half=True, quant=True)
    served   float32 tensors that hold bfloat16 values, every quantiser and every rounding point of the served model     Mode(quant=True, rounded=True)
Sequences start at position 0; lengths are multiples of 128 (pad at the end: nothing looks ahead).  The pieces between the matrix products of
attention are separate functions so that each can be compiled by itself: they see flat [tokens, ...] tensors, whose shape does not change with the
sequence length.
"""
import dataclasses
import math

import torch
import torch.nn.functional as F

import quant
from sinkhorn import sinkhorn

CONFIG = dict(
    architectures=['DeepseekV4ForCausalLM'], model_type='deepseek_v4', hidden_size=256, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64,
    q_lora_rank=128, o_groups=2, o_lora_rank=128, sliding_window=128, compress_ratios=[0, 0, 4, 128, 4, 0], index_n_heads=4, index_head_dim=128, index_topk=64, n_routed_experts=8,
    num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=128, scoring_func='sqrtsoftplus', topk_method='noaux_tc', norm_topk_prob=True, routed_scaling_factor=1.5, num_hash_layers=2,
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, swiglu_limit=10.0, hidden_act='silu', rms_norm_eps=1e-6, vocab_size=2560, num_nextn_predict_layers=1, max_position_embeddings=1048576,
    rope_theta=10000, compress_rope_theta=160000,
    rope_scaling=dict(type='yarn', factor=16, original_max_position_embeddings=65536, beta_fast=32, beta_slow=1),
    bos_token_id=0, eos_token_id=1, tie_word_embeddings=False, attention_bias=False, attention_dropout=0.0, initializer_range=0.02, use_cache=True, torch_dtype='bfloat16', transformers_version='4.57.1',
    quantization_config=dict(quant_method='fp8', fmt='e4m3', scale_fmt='ue8m0', activation_scheme='dynamic', weight_block_size=[128, 128]), expert_dtype='fp4')


@dataclasses.dataclass(frozen=True)
class Mode:
    half: bool = False          # bfloat16 tensors
    quant: bool = False         # quantisers
    rounded: bool = False       # round to bfloat16 values at every rounding point, in float32 tensors
    topk: bool = True           # the indexer chooses; otherwise every compressed entry is attended
    compiled: bool = False
    fixed: bool = False         # the weights are a checkpoint's: already what their quantised form means

    @property
    def requant(s):
        return s.quant and not s.fixed

    def r(s, x):
        if s.rounded:
            return x.to(torch.bfloat16).to(torch.float32)
        return x.to(torch.bfloat16) if s.half else x

    def cast(s, w):
        return w.to(torch.bfloat16) if s.half else s.r(w)


EXACT, SERVED = Mode(), Mode(quant=True, rounded=True, fixed=True)


def lin(x, w, mode, kind='fp8'):
    """x w^T with a bf16, FP8 or MXFP4 weight; quantised weights also quantise x"""
    if mode.quant and kind:
        x = quant.s8(x, 128)
    if mode.requant and kind:
        w = quant.fp8(w) if kind == 'fp8' else quant.mx4(w)
    return mode.r(x @ mode.cast(w).mT)


def rms(x, w, eps, mode):
    y = x.float()
    return mode.r(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (mode.cast(w).float() if mode.half or mode.rounded else w))


def rope(x, cos, sin, mode, inverse=False):
    """rotates the last 64 channels, interleaved pairs; cos, sin broadcast against [..., 32]"""
    a, b = x[..., :-64], x[..., -64:].float().unflatten(-1, (32, 2))
    e, o = b[..., 0], b[..., 1]
    if inverse:
        sin = -sin
    return torch.cat([a, mode.r(torch.stack([e * cos - o * sin, e * sin + o * cos], -1).flatten(-2)).to(a.dtype)], -1)


# ------------------------------------------------------------------------------------------------ pieces
def p_hc_weights(X, fn, scale, base, eps, hc_eps, mode):
    f = X.flatten(-2)
    m = (f @ (fn.to(f.dtype)).T).float() * torch.rsqrt(f.float().square().mean(-1, keepdim=True) + eps)
    m = m * torch.cat([scale[0].expand(4), scale[1].expand(4), scale[2].expand(16)]) + base
    return torch.sigmoid(m[:, :4]) + hc_eps, 2 * torch.sigmoid(m[:, 4:8]), m[:, 8:].unflatten(-1, (4, 4))


def p_hc_collapse(X, pre, norm, eps, mode):
    return rms(mode.r((pre[..., None] * X.float()).sum(-2)), norm, eps, mode)


def p_hc_spread(y, X, post, C, mode):
    return mode.r(post[..., None] * y.float()[:, None] + (C[..., None] * X.float()[:, :, None]).sum(1))


def p_head(X, fn, scale, base, norm, eps, hc_eps, mode):
    f = X.flatten(-2)
    m = (f @ (fn.to(f.dtype)).T).float() * torch.rsqrt(f.float().square().mean(-1, keepdim=True) + eps)
    return rms(mode.r(((torch.sigmoid(m * scale + base) + hc_eps)[..., None] * X.float()).sum(-2)), norm, eps, mode)


def p_loss(h, head, target, weight, mode):
    """sum of weighted cross-entropies, in nats"""
    z = (h @ mode.cast(head).mT).float()
    n = torch.logsumexp(z, -1) - z.gather(-1, target[:, None])[:, 0]
    return (n * weight).sum()


def p_attn_in(x, wq_a, q_norm, wq_b, wkv, kv_norm, cos, sin, heads, eps, mode):
    qr = rms(lin(x, wq_a, mode), q_norm, eps, mode)
    q = lin(qr, wq_b, mode).unflatten(-1, (heads, -1))
    qf = q.float()
    q = mode.r(qf * torch.rsqrt(qf.square().mean(-1, keepdim=True) + eps))
    q = rope(q, cos[:, None], sin[:, None], mode)
    kv = rope(rms(lin(x, wkv, mode), kv_norm, eps, mode), cos, sin, mode)
    return qr, q, cache(kv, mode)


def cache(kv, mode):
    """S8 on all but the rotated channels"""
    return torch.cat([quant.s8(kv[..., :-64], 64), kv[..., -64:]], -1) if mode.quant else kv


def index_form(x, H, mode):
    return quant.s4(mode.r(x @ H.to(x.dtype))) if mode.quant else x


def p_pool(K, S, ape, norm, cos, sin, H, ratio, eps, mode):
    """K, S [B, T, c d] -> entries [B, T / ratio, d]; H: Hadamard matrix of the index form, None for the main form"""
    K, S = K.float().unflatten(1, (-1, ratio)), S.float().unflatten(1, (-1, ratio)) + ape
    if ratio == 4:
        d = K.shape[-1] // 2
        pk, ps = F.pad(K[:, :-1, :, :d], (0, 0, 0, 0, 1, 0)), F.pad(S[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=-1e30)
        K, S = torch.cat([pk, K[..., d:]], 2), torch.cat([ps, S[..., d:]], 2)
    e = mode.r((K * torch.softmax(S, 2)).sum(2))
    e = rope(rms(e, norm, eps, mode), cos, sin, mode)
    return cache(e, mode) if H is None else index_form(e, H, mode)


def p_softmax_window(W, mask, sink, scale, mode):
    """W [B, nb, 128, H, 256]"""
    W = (W.float() * scale).masked_fill(~mask, -1e30)
    M = torch.maximum(W.amax(-1, keepdim=True), sink[:, None]).detach()
    E = torch.exp(W - M)
    Z = E.sum(-1, keepdim=True) + torch.exp(sink[:, None] - M)
    return (E / Z).to(torch.bfloat16 if mode.half else torch.float32)


def p_softmax_both(W, Cs, mask, keep, sink, scale, mode):
    """W [B, T, H, 256] window scores, Cs [B, T, H, n] compressed scores, keep [B or 1, T, n] -> both probabilities"""
    W, Cs = (W.float() * scale).masked_fill(~mask, -1e30), (Cs.float() * scale).masked_fill(~keep[:, :, None], -1e30)
    M = torch.maximum(torch.maximum(W.amax(-1, keepdim=True), Cs.amax(-1, keepdim=True)), sink[:, None]).detach()
    E, G = torch.exp(W - M), torch.exp(Cs - M)
    Z = E.sum(-1, keepdim=True) + G.sum(-1, keepdim=True) + torch.exp(sink[:, None] - M)
    t = torch.bfloat16 if mode.half else torch.float32
    return (E / Z).to(t), (G / Z).to(t)


def p_attn_out(o, cos, sin, wo_a, wo_b, groups, mode):
    o = rope(mode.r(o), cos[:, None], sin[:, None], mode, True).flatten(-2).unflatten(-1, (groups, -1))
    wa = mode.cast(quant.fp8(wo_a) if mode.requant else wo_a).unflatten(0, (groups, -1))
    z = mode.r(torch.einsum('ngi,goi->ngo', o, wa)).flatten(-2)
    return lin(z, wo_b, mode)


def p_index_query(x, qr, wq_b, weights, cos, sin, H, heads, mode):
    qi = rope(lin(qr, wq_b, mode).unflatten(-1, (heads, -1)), cos[:, None], sin[:, None], mode)
    d = qi.shape[-1]
    return index_form(qi, H, mode), mode.r(lin(x, weights, mode, None) * (d ** -0.5 * heads ** -0.5))


def p_index_score(dots, w, mode):
    """dots [B, T, h, n], w [B, T, h] -> [B, T, n]"""
    if mode.rounded:
        return mode.r(mode.r(torch.relu(mode.r(dots)) * w[..., None]).sum(-2))
    return (torch.relu(dots.float()) * w.float()[..., None]).sum(-2)


def p_index_loss(scores, C, W, wmask, vis, sink, scale):
    """mean over queries of KL(attention on compressed entries, summed over heads and normalised || softmax of the index scores).
    C [B, T, H, n] and W [B, T, H, 256]: attention scores, without gradient."""
    C, W = (C.float() * scale).masked_fill(~vis[:, :, None], -1e30), (W.float() * scale).masked_fill(~wmask, -1e30)
    M = torch.maximum(C.amax(-1, keepdim=True), torch.maximum(W.amax(-1, keepdim=True), sink[:, None]))
    E = torch.exp(C - M)
    Z = E.sum(-1, keepdim=True) + torch.exp(W - M).sum(-1, keepdim=True) + torch.exp(sink[:, None] - M)
    p = (E / Z).sum(2)
    p = p / (p.sum(-1, keepdim=True) + 1e-20)
    lq = torch.log_softmax(scores.masked_fill(~vis, -1e30), -1)
    some = vis.any(-1).float()
    kl = (p * (torch.log(p + 1e-9) - lq.clamp(min=-60))).sum(-1)
    return (kl * some).sum() / (some.sum() * kl.shape[0] / some.shape[0] + 1)


def p_gate(x, gate, bias, topk, scale, mode):
    """weights [N, E] (zero where not chosen) and the choice"""
    g = torch.sqrt(F.softplus((x @ mode.cast(gate).mT).float()))
    s = (g + bias).detach()
    n = torch.arange(s.shape[-1], device=s.device)
    before = (s[:, None, :] > s[:, :, None]) | ((s[:, None, :] == s[:, :, None]) & (n[None, None, :] < n[None, :, None]))
    chosen = (before.sum(-1) < topk).float()
    w = g * chosen
    return w / w.sum(-1, keepdim=True) * scale, chosen.sum(0)


def p_gate_hash(x, gate, chosen, scale, mode):
    w = torch.sqrt(F.softplus((x @ mode.cast(gate).mT).float())) * chosen
    return w / w.sum(-1, keepdim=True) * scale


def p_moe(x, W, w1, w3, w2, s1, s3, s2, limit, mode):
    """All experts on all tokens, unchosen ones with weight zero; the shared expert is one more with weight one."""
    q = mode.quant
    e = len(w1)
    one = torch.cat([W, torch.ones_like(W[:, :1])], -1)
    f8, f4 = (quant.fp8, quant.mx4) if mode.requant else (lambda z: z, lambda z: z)
    up = mode.cast(torch.cat([torch.cat([f4(w1), f8(s1)[None]]), torch.cat([f4(w3), f8(s3)[None]])], 1))      # [E + 1, 2 I, D]
    down = mode.cast(torch.cat([f4(w2), f8(s2)[None]]))                                                        # [E + 1, D, I]
    y = mode.r((quant.s8(x, 128) if q else x) @ up.flatten(0, 1).mT).unflatten(-1, (e + 1, 2, -1)).float()
    a, b = y[:, :, 0].clamp(max=limit), y[:, :, 1].clamp(-limit, limit)
    v = mode.r(a * torch.sigmoid(a) * b * one[..., None])
    if q:
        v = quant.s8(v, 128)
    if mode.rounded:
        parts = mode.r(torch.einsum('nei,edi->ned', v, down))
        return mode.r(parts.sum(1))
    return mode.r(v.flatten(1) @ down.transpose(1, 2).flatten(0, 1))


def p_mtp_in(X, e, enorm, hnorm, e_proj, h_proj, eps, mode):
    return mode.r(lin(rms(e, enorm, eps, mode), e_proj, mode)[:, None] + lin(rms(X, hnorm, eps, mode), h_proj, mode))


PIECES = {k: v for k, v in list(globals().items()) if k.startswith('p_')}
COMPILED, BACKEND = {}, 'inductor'


def piece(name, mode):
    if not mode.compiled:
        return PIECES[name]
    if name not in COMPILED:
        COMPILED[name] = torch.compile(PIECES[name], dynamic=False, backend=BACKEND)
    return COMPILED[name]


# ------------------------------------------------------------------------------------------------ parameters
def shapes(c):
    """name -> (shape, how it is stored); stored: fp8, mx4, bf16, f32.  Experts are stacked."""
    D, hd, qd, nh, g, ol = c['hidden_size'], c['head_dim'], c['q_lora_rank'], c['num_attention_heads'], c['o_groups'], c['o_lora_rank']
    E, I, V, m, ih, idd = c['n_routed_experts'], c['moe_intermediate_size'], c['vocab_size'], c['hc_mult'], c['index_n_heads'], c['index_head_dim']
    s = {'embed.weight': ((V, D), 'bf16'), 'head.weight': ((V, D), 'bf16'), 'norm.weight': ((D,), 'bf16'), 'hc_head_fn': ((m, m * D), 'f32'), 'hc_head_base': ((m,), 'f32'), 'hc_head_scale': ((1,), 'f32')}

    def compressor(p, r, d):
        k = 2 if r == 4 else 1
        s[p + 'ape'] = ((r, k * d), 'f32')
        s[p + 'wkv.weight'] = s[p + 'wgate.weight'] = ((k * d, D), 'bf16')
        s[p + 'norm.weight'] = ((d,), 'bf16')

    def block(p, ratio, hashed):
        n = (2 + m) * m
        for h in ('hc_attn', 'hc_ffn'):
            s[p + h + '_fn'], s[p + h + '_base'], s[p + h + '_scale'] = ((n, m * D), 'f32'), ((n,), 'f32'), ((3,), 'f32')
        s[p + 'attn_norm.weight'] = s[p + 'ffn_norm.weight'] = ((D,), 'bf16')
        a = p + 'attn.'
        s[a + 'attn_sink'] = ((nh,), 'f32')
        s[a + 'wq_a.weight'], s[a + 'q_norm.weight'], s[a + 'wq_b.weight'] = ((qd, D), 'fp8'), ((qd,), 'bf16'), ((nh * hd, qd), 'fp8')
        s[a + 'wkv.weight'], s[a + 'kv_norm.weight'] = ((hd, D), 'fp8'), ((hd,), 'bf16')
        s[a + 'wo_a.weight'], s[a + 'wo_b.weight'] = ((g * ol, nh * hd // g), 'fp8'), ((D, g * ol), 'fp8')
        if ratio:
            compressor(a + 'compressor.', ratio, hd)
        if ratio == 4:
            s[a + 'indexer.wq_b.weight'], s[a + 'indexer.weights_proj.weight'] = ((ih * idd, qd), 'fp8'), ((ih, D), 'bf16')
            compressor(a + 'indexer.compressor.', 4, idd)
        f = p + 'ffn.'
        s[f + 'gate.weight'] = ((E, D), 'bf16')
        if not hashed:
            s[f + 'gate.bias'] = ((E,), 'f32')
        for w, sh in (('w1', (I, D)), ('w3', (I, D)), ('w2', (D, I))):
            s[f + f'experts.{w}'], s[f + f'shared_experts.{w}.weight'] = ((E,) + sh, 'mx4'), (sh, 'fp8')

    for i in range(c['num_hidden_layers']):
        block(f'layers.{i}.', c['compress_ratios'][i], i < c['num_hash_layers'])
    if c['num_nextn_predict_layers']:
        p = 'mtp.0.'
        block(p, 0, False)
        s[p + 'e_proj.weight'] = s[p + 'h_proj.weight'] = ((D, D), 'fp8')
        for n in ('enorm', 'hnorm', 'norm'):
            s[p + n + '.weight'] = ((D,), 'bf16')
        s[p + 'hc_head_fn'], s[p + 'hc_head_base'], s[p + 'hc_head_scale'] = ((m, m * D), 'f32'), ((m,), 'f32'), ((1,), 'f32')
    return s


def frequencies(c, ratio):
    rd = c['qk_rope_head_dim']
    i = torch.arange(0, rd, 2, dtype=torch.float64) / rd
    if not ratio:
        return c['rope_theta'] ** -i
    f, y = c['compress_rope_theta'] ** -i, c.get('rope_scaling')
    if not y:
        return f
    at = lambda n: rd * math.log(y['original_max_position_embeddings'] / (n * 2 * math.pi)) / (2 * math.log(c['compress_rope_theta']))
    lo, hi = max(math.floor(at(y['beta_fast'])), 0), min(math.ceil(at(y['beta_slow'])), rd - 1)
    ramp = ((torch.arange(rd // 2, dtype=torch.float64) - lo) / ((hi - lo) or 0.001)).clamp(0, 1)
    return f / y['factor'] * ramp + f * (1 - ramp)


class Model:
    """Parameters by their official names (experts stacked), tid2eid tables, and the forward pass."""
    def __init__(s, config, device='cpu'):
        s.c, s.device = config, device
        s.kind = {k: v[1] for k, v in shapes(config).items()}
        s.p = {k: torch.zeros(v[0], device=device) for k, v in shapes(config).items()}
        s.tid2eid = {i: torch.zeros(config['vocab_size'], config['num_experts_per_tok'], dtype=torch.int64, device=device) for i in range(config['num_hash_layers'])}
        s.H = quant.hadamard(config['index_head_dim'], device)
        s.tables, s.loads, s.index_losses, s.keep_scores = {}, {}, [], None

    def init(s, seed):
        """Starting values: output projections zero, streams read one at a time, entries of ratio 4 in parts, everything else small and random."""
        g = torch.Generator().manual_seed(seed)
        for k, w in s.p.items():
            n = lambda std: (torch.randn(w.shape, generator=g) * std).to(w.device)
            last = k.split('.')[-1]
            if k == 'embed.weight':
                v = n(0.5)
            elif k == 'head.weight' or k.endswith(('wo_b.weight', 'w2', 'w2.weight', 'gate.bias', 'attn_sink', 'ape')):
                v = n(0.0)
            elif 'norm.weight' in k:
                v = n(0.0) + 1
            elif last.endswith('_fn'):
                v = n(0.02)
            elif last.endswith('_scale'):
                v = n(0.0) + 0.1
            elif last == 'hc_head_base':
                v = n(0.0)
            elif last.endswith('_base'):
                i = (int(k.split('.')[1]) if k.startswith('layers') else s.c['num_hidden_layers']) * 2 + ('ffn' in last)
                pre = torch.full((4,), -1.5)
                pre[i % 4] = 1.5
                v = torch.cat([pre, torch.zeros(4), (torch.eye(4) * 3).flatten()]).to(w.device)
            elif k.endswith('gate.weight'):
                v = n(0.5 * w.shape[-1] ** -0.5)
            else:
                v = n(w.shape[-1] ** -0.5)
            w.copy_(v)
        for i, ratio in enumerate(s.c['compress_ratios'][:s.c['num_hidden_layers']]):
            if ratio == 4:
                s.slots(f'layers.{i}.attn.')
        return s

    def slots(s, p):
        """An entry of ratio 4 is a softmax mean over eight tokens, channel by channel.  Started from even means it stays one: which of the eight was meant is lost, and a
        copy takes a neighbour.  So each of the four own tokens starts with a quarter of the unrotated channels, and each head looks for one of the four and reads
        that one; with as many heads as tokens a layer can follow any of them."""
        hd, nh, g = s.c['head_dim'], s.c['num_attention_heads'], s.c['o_groups']
        n = (hd - 64) // 4
        ape, q = s.p[p + 'compressor.ape'], s.p[p + 'wq_b.weight'].view(nh, hd, -1)
        o = s.p[p + 'wo_a.weight'].view(g, -1, nh // g, hd)
        for j in range(4):
            ape[j, hd + n * j:hd + n * (j + 1)] = 4
        for h in range(nh):
            other = torch.ones(hd, dtype=torch.bool, device=ape.device)
            other[n * (h % 4):n * (h % 4 + 1)] = other[-64:] = False
            q[h, other] *= .1
            o[h // (nh // g), :, h % (nh // g), other] *= .1
        d = s.c['index_head_dim']
        s.p[p + 'indexer.compressor.ape'][:, d:] = 2                     # the index form of an entry: its own four tokens first

    def set_hash(s, counts):
        """Spread tokens over experts so that the loads balance: the most frequent token first, to the least loaded experts."""
        E, k = s.c['n_routed_experts'], s.c['num_experts_per_tok']
        order = sorted(range(s.c['vocab_size']), key=lambda t: (-counts[t], t))
        for i in s.tid2eid:
            load, rows = [0.0] * E, torch.zeros(s.c['vocab_size'], k, dtype=torch.int64)
            for t in order:
                best = sorted(range(E), key=lambda e: (load[e], (e * 5 + t * (i + 3)) % 11, e))[:k]
                for e in best:
                    load[e] += counts[t] + 0.01
                rows[t] = torch.tensor(best)
            s.tid2eid[i] = rows.to(s.device)
        s.tables.clear()

    # ---- tables that depend on the length only
    def table(s, key, make):
        if key not in s.tables:
            s.tables[key] = make()
        return s.tables[key]

    def angles(s, T, B, ratio, step=1):
        """cos, sin of positions 0, step, 2 step .. for [B * T] flat tokens, or [T / step] entries"""
        def make():
            a = torch.arange(0, T, step, dtype=torch.float32)[:, None] * frequencies(s.c, ratio).float()
            return tuple((t.repeat(B, 1) if step == 1 else t).to(s.device) for t in (torch.cos(a), torch.sin(a)))
        return s.table(('angles', T, B, bool(ratio), step), make)

    def window_mask(s, T):
        def make():
            w = s.c['sliding_window']
            a, i = torch.arange(w)[:, None], torch.arange(2 * w)[None]
            m = (i <= w + a) & (i > a)
            return torch.stack([m & (i >= w), m]).to(s.device)[(torch.arange(T // w) > 0).long().to(s.device)]      # [nb, 128, 256]
        return s.table(('window', T), make)

    def visible(s, T, ratio):
        return s.table(('visible', T, ratio), lambda: (torch.arange(T // ratio)[None] < ((torch.arange(T) + 1) // ratio)[:, None]).to(s.device)[None])

    # ---- parts
    def compress(s, p, x, B, T, ratio, index, mode):
        f = lambda n: (x @ mode.cast(s.p[p + n]).mT).unflatten(0, (B, T))
        return piece('p_pool', mode)(f('wkv.weight'), f('wgate.weight'), s.p[p + 'ape'], s.p[p + 'norm.weight'], *s.angles(T, 1, ratio, ratio), s.H if index else None, ratio, s.c['rms_norm_eps'], mode)

    def choose(s, scores, vis):
        """the index_topk best visible entries, ties to the lowest index"""
        k = s.c['index_topk']
        sc = scores.masked_fill(~vis, float('-inf'))
        order = torch.sort(sc, dim=-1, stable=True, descending=True)[1][..., :k]
        return torch.zeros_like(sc, dtype=torch.bool).scatter_(-1, order, True) & vis

    def attention(s, p, ratio, x, B, T, mode, train):
        c, P = s.c, s.p
        nh, hd, eps, w = c['num_attention_heads'], c['head_dim'], c['rms_norm_eps'], c['sliding_window']
        cos, sin = s.angles(T, B, ratio)
        qr, q, kv = piece('p_attn_in', mode)(x, P[p + 'wq_a.weight'], P[p + 'q_norm.weight'], P[p + 'wq_b.weight'], P[p + 'wkv.weight'], P[p + 'kv_norm.weight'], cos, sin, nh, eps, mode)
        nb = T // w
        kb = kv.view(B, nb, w, hd)
        kb = torch.cat([F.pad(kb[:, :-1], (0, 0, 0, 0, 1, 0)), kb], 2)    # [B, nb, 256, hd]
        qb = q.view(B * nb, w * nh, hd)
        kb = kb.view(B * nb, 2 * w, hd)
        W = torch.bmm(qb, kb.mT)
        mask = s.window_mask(T)
        if not ratio:
            Pw = piece('p_softmax_window', mode)(W.view(B, nb, w, nh, 2 * w), mask[None, :, :, None], P[p + 'attn_sink'], hd ** -0.5, mode)
            o = torch.bmm(Pw.view(B * nb, w * nh, 2 * w), kb)
        else:
            ce = s.compress(p + 'compressor.', x, B, T, ratio, False, mode)
            n = ce.shape[1]
            Cs = torch.bmm(q.view(B, T * nh, hd), ce.mT).view(B, T, nh, n)
            vis = s.visible(T, ratio)
            keep, W4, m4 = vis, W.view(B, T, nh, 2 * w), mask.view(1, T, 1, 2 * w)
            if ratio == 4 and (train is not None or (mode.topk and n > c['index_topk']) or s.keep_scores is not None):
                keep = s.indexer(p + 'indexer.', x, qr, B, T, W4, Cs, m4, vis, P[p + 'attn_sink'], mode, train)
            Pw, Pc = piece('p_softmax_both', mode)(W4, Cs, m4, keep, P[p + 'attn_sink'], hd ** -0.5, mode)
            o = torch.bmm(Pw.view(B * nb, w * nh, 2 * w), kb).view(B, T * nh, hd) + torch.bmm(Pc.view(B, T * nh, n), ce)
        return piece('p_attn_out', mode)(o.view(B * T, nh, hd), cos, sin, P[p + 'wo_a.weight'], P[p + 'wo_b.weight'], c['o_groups'], mode)

    def indexer(s, p, x, qr, B, T, W, Cs, wmask, vis, sink, mode, train):
        """Which entries each query may use; in training also adds the indexer's own loss, on inputs without gradient."""
        c, P = s.c, s.p
        x, qr = x.detach(), qr.detach()
        ki = s.compress(p + 'compressor.', x, B, T, 4, True, mode)
        qi, wi = piece('p_index_query', mode)(x, qr, P[p + 'wq_b.weight'], P[p + 'weights_proj.weight'], *s.angles(T, B, 4), s.H, c['index_n_heads'], mode)
        h, d, n = c['index_n_heads'], c['index_head_dim'], ki.shape[1]
        qi, wi = qi.view(B, T, h, d), wi.view(B, T, h)
        score = lambda a, b: piece('p_index_score', mode)(torch.bmm(a.reshape(B, -1, d), ki.mT).view(B, -1, h, n), b, mode)
        if train is not None:
            r = train % 4                                                  # a quarter of the queries, another one each step
            sub = slice(r, None, 4)
            sc = score(qi[:, sub], wi[:, sub].contiguous())
            s.index_losses.append(piece('p_index_loss', mode)(sc, Cs[:, sub].detach().contiguous(), W[:, sub].detach().contiguous(), wmask[:, sub].contiguous(), vis[:, sub].contiguous(), sink.detach(), c['head_dim'] ** -0.5))
        if not mode.topk or n <= c['index_topk']:
            if s.keep_scores is not None:
                s.keep_scores.append((score(qi, wi), Cs, vis))
            return vis
        with torch.no_grad():
            sc = score(qi, wi)
            if s.keep_scores is not None:
                s.keep_scores.append((sc, Cs, vis))
            if mode.half:                                                  # training: ties at the cut are all kept
                sc = sc.masked_fill(~vis, -1e30)
                cut = torch.topk(sc, c['index_topk'], -1, sorted=False)[0].amin(-1, keepdim=True)
                return (sc >= cut) & vis
            return s.choose(sc, vis)

    def moe(s, p, layer, x, ids, mode):
        c, P = s.c, s.p
        f = p + 'ffn.'
        if layer is not None and layer < c['num_hash_layers']:
            hot = s.table(('hot', layer), lambda: torch.zeros(c['vocab_size'], c['n_routed_experts'], device=s.device).scatter_(1, s.tid2eid[layer], 1.0))
            W = piece('p_gate_hash', mode)(x, P[f + 'gate.weight'], hot[ids], c['routed_scaling_factor'], mode)
        else:
            W, s.loads[f + 'gate.bias'] = piece('p_gate', mode)(x, P[f + 'gate.weight'], P[f + 'gate.bias'], c['num_experts_per_tok'], c['routed_scaling_factor'], mode)
        return piece('p_moe', mode)(x, W, *(P[f + f'experts.{w}'] for w in ('w1', 'w3', 'w2')), *(P[f + f'shared_experts.{w}.weight'] for w in ('w1', 'w3', 'w2')), c['swiglu_limit'], mode)

    def sublayer(s, X, p, which, norm, fn, mode):
        c, P = s.c, s.p
        eps, he = c['rms_norm_eps'], c['hc_eps']
        pre, post, L = piece('p_hc_weights', mode)(X, P[p + which + '_fn'], P[p + which + '_scale'], P[p + which + '_base'], eps, he, mode)
        C = sinkhorn(L, c['hc_sinkhorn_iters'], he)
        y = fn(piece('p_hc_collapse', mode)(X, pre, P[p + norm], eps, mode))
        return piece('p_hc_spread', mode)(y, X, post, C, mode)

    def block(s, p, layer, ratio, X, ids, B, T, mode, train):
        X = s.sublayer(X, p, 'hc_attn', 'attn_norm.weight', lambda x: s.attention(p + 'attn.', ratio, x, B, T, mode, train), mode)
        return s.sublayer(X, p, 'hc_ffn', 'ffn_norm.weight', lambda x: s.moe(p, layer, x, ids, mode), mode)

    def streams(s, ids, mode, train=None):
        """ids [B, T] -> the four streams after the last layer, [B * T, 4, D]; train: step number, or None"""
        B, T = ids.shape
        flat = ids.reshape(-1)
        X = F.embedding(flat, mode.cast(s.p['embed.weight']))[:, None].expand(-1, s.c['hc_mult'], -1).contiguous()
        for i in range(s.c['num_hidden_layers']):
            X = s.block(f'layers.{i}.', i, s.c['compress_ratios'][i], X, flat, B, T, mode, train)
        return X

    def hidden(s, X, mode, p=''):
        return piece('p_head', mode)(X, s.p[p + 'hc_head_fn'], s.p[p + 'hc_head_scale'], s.p[p + 'hc_head_base'], s.p[p + 'norm.weight'], s.c['rms_norm_eps'], s.c['hc_eps'], mode)

    def mtp_hidden(s, X, following, B, T, mode, train=None):
        """X streams [B * T, 4, D], following [B, T]: the token after each position"""
        p = 'mtp.0.'
        e = F.embedding(following.reshape(-1), mode.cast(s.p['embed.weight']))
        x = piece('p_mtp_in', mode)(X, e, s.p[p + 'enorm.weight'], s.p[p + 'hnorm.weight'], s.p[p + 'e_proj.weight'], s.p[p + 'h_proj.weight'], s.c['rms_norm_eps'], mode)
        return s.hidden(s.block(p, None, 0, x, following.reshape(-1), B, T, mode, train), mode, p)

    def logits(s, h, mode):
        return (h @ mode.cast(s.p['head.weight']).mT).float()

    @torch.no_grad()
    def run(s, tokens, mode, mtp=False, rows=None):
        """logits [len(tokens), V] of one sequence (any length), float32; rows: a slice of positions"""
        n = len(tokens)
        ids = torch.zeros(1, -(-n // 128) * 128, dtype=torch.int64, device=s.device)
        ids[0, :n] = torch.as_tensor(tokens)
        X = s.streams(ids, mode)
        rows = rows if rows is not None else slice(0, n)
        out = s.logits(s.hidden(X[rows], mode), mode)
        if not mtp:
            return out
        nxt = torch.roll(ids, -1, 1)
        return out, s.logits(s.mtp_hidden(X, nxt, 1, ids.shape[1], mode)[rows], mode)
