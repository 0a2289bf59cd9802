"""The two optimisers: Muon for the weight matrices inside the layers, AdamW for everything else.  Both keep plain tensors, so that a run can be
saved and resumed exactly."""
import torch

# AdamW step sizes by the end of the name; the first match counts
ADAM = (('embed.weight', 0.01), ('head.weight', 0.004), ('norm.weight', 0.004), ('_fn', 0.001), ('_base', 0.006), ('_scale', 0.006), ('attn_sink', 0.006), ('ape', 0.006), ('gate.weight', 0.002), ('weights_proj.weight', 0.003))


def is_matrix(name):
    return name.endswith(('wq_a.weight', 'wq_b.weight', 'wkv.weight', 'wgate.weight', 'wo_a.weight', 'wo_b.weight', 'w1', 'w2', 'w3', 'w1.weight', 'w2.weight', 'w3.weight', 'e_proj.weight', 'h_proj.weight'))


def orthogonal(g):
    """Newton-Schulz iteration towards the orthogonal factor, [k, o, i]"""
    x = g.to(torch.bfloat16) if g.is_cuda else g          # bfloat16 products crawl on most CPUs
    flip = x.shape[1] > x.shape[2]
    if flip:
        x = x.mT
    x = x / (x.float().norm(dim=(1, 2), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return (x.mT if flip else x).float()


class Optimiser:
    def __init__(s, params, config, muon_lr=0.02, decay=0.05):
        s.params, s.lr, s.decay, s.t = params, muon_lr, decay, 0
        groups = {}
        for k, w in params.items():
            if is_matrix(k):
                parts = config['o_groups'] if k.endswith('wo_a.weight') else 2 if 'compressor' in k and w.shape[0] in (1024,) else 1
                v = (len(w),) + tuple(w.shape[1:]) if w.dim() == 3 else (parts, w.shape[0] // parts, w.shape[1])
                groups.setdefault(v[1:], []).append((k, v))
        s.groups = sorted(groups.items())
        s.momentum = {sh: torch.zeros((sum(v[0] for _, v in ks),) + sh, device=params[ks[0][0]].device) for sh, ks in s.groups}
        s.adam = [k for k in params if not is_matrix(k) and not k.endswith('gate.bias')]
        s.adam_lr = [next(v for e, v in ADAM if k.endswith(e)) for k in s.adam]
        s.m = [torch.zeros_like(params[k]) for k in s.adam]
        s.v = [torch.zeros_like(params[k]) for k in s.adam]

    @torch.no_grad()
    def step(s, scale):
        s.t += 1
        mu = min(0.85 + 0.1 * s.t / 300, 0.95)
        for sh, ks in s.groups:
            g = torch.cat([s.params[k].grad.reshape(v) if s.params[k].grad is not None else torch.zeros(v, device=s.params[k].device) for k, v in ks])
            M = s.momentum[sh]
            M.lerp_(g, 1 - mu)
            u = orthogonal(g.lerp(M, mu)) * (-s.lr * scale * max(1.0, sh[0] / sh[1]) ** 0.5)
            ws = [s.params[k].view(v) for k, v in ks]
            torch._foreach_mul_(ws, 1 - s.lr * scale * s.decay)
            torch._foreach_add_(ws, list(u.split([v[0] for _, v in ks])))
        ps = [s.params[k] for k in s.adam]
        gs = [p.grad if p.grad is not None else torch.zeros_like(p) for p in ps]
        torch._foreach_lerp_(s.m, gs, 0.1)
        torch._foreach_mul_(s.v, 0.95)
        torch._foreach_addcmul_(s.v, gs, gs, 0.05)
        c1, c2 = 1 - 0.9 ** s.t, 1 - 0.95 ** s.t
        den = torch._foreach_sqrt(torch._foreach_div(s.v, c2))
        torch._foreach_add_(den, 1e-10)
        up = torch._foreach_div(s.m, den)
        torch._foreach_mul_(up, [-lr * scale / c1 for lr in s.adam_lr])
        torch._foreach_add_(ps, up)
        for p in s.params.values():
            p.grad = None

    def state(s):
        return {'t': s.t, 'momentum': s.momentum, 'm': s.m, 'v': s.v}

    def restore(s, st):
        s.t = st['t']
        for k in s.momentum:
            s.momentum[k].copy_(st['momentum'][k])
        for a, b in zip(s.m + s.v, st['m'] + st['v']):
            a.copy_(b)
