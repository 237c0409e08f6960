"""The parts of our leaves that files hold, whatever a family calls them.

Leaves have their input axis first and are fused as the forward pass reads them (see
`dllm_jax.models.dense` and `moe`); files hold torch's `[out, in]` matrices. No code, only the
parts.
"""

import numpy as np

from .spec import Part

VECTOR = Part((0,))
TABLE = Part((0, 1))  # [V, D] on both sides
MATRIX = Part((1, 0))  # [in, out] of ours, [out, in] in the file

# wqkv [D, G, n + 2, H]: for each KV group its n query heads, its key, its value.
QUERIES = Part((1, 2, 3, 0), (3, 1), np.s_[:, :, :-2])  # [D, G, n, H] -> [G n H, D]
KEY = Part((1, 2, 0), (2, 1), np.s_[:, :, -2])  # [D, G, H] -> [G H, D]
VALUE = Part((1, 2, 0), (2, 1), np.s_[:, :, -1])
# bqkv [G, n + 2, H]
QUERY_BIAS = Part((0, 1, 2), (3,), np.s_[:, :-2])
KEY_BIAS = Part((0, 1), (2,), np.s_[:, -2])
VALUE_BIAS = Part((0, 1), (2,), np.s_[:, -1])
OUTPUT = Part((2, 0, 1), (1, 2))  # [N, H, D] -> [D, N H]

# w_gate_up [D, C, 2, W], F = C W
GATE = Part((1, 2, 0), (2, 1), np.s_[:, :, 0])  # [D, C, W] -> [F, D]
UP = Part((1, 2, 0), (2, 1), np.s_[:, :, 1])
# the same of one expert, [D, 2, F]
EXPERT_GATE = Part((1, 0), index=np.s_[:, 0])  # [D, F] -> [F, D]
EXPERT_UP = Part((1, 0), index=np.s_[:, 1])

# experts_gate_up [E, D, 2, F] and experts_down [E, F, D], all experts in one tensor
ALL_GATES = Part((0, 2, 1), index=np.s_[:, :, 0])  # [E, D, F] -> [E, F, D]
ALL_UPS = Part((0, 2, 1), index=np.s_[:, :, 1])
ALL_GATES_AND_UPS = Part((0, 2, 3, 1), (1, 2, 1))  # [E, D, 2, F] -> [E, 2 F, D]
ALL_DOWNS = Part((0, 2, 1))  # [E, F, D] -> [E, D, F]
