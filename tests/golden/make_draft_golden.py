"""Makes `draft.npz`: what transformers says of a tiny DFlash draft next to a tiny Qwen3.

Run by hand where torch and transformers 5.23 are installed; the tests read its output without them:

    python -m tests.golden.make_draft_golden

The target's hidden states are taken by hooks after its layers, so that the last one is before the
final norm; the draft is MuseGlimmerAssistantModel, which is DFlash's first version, given z-lab's
tensors under its names. Stored: `ids`, `features` of them, and for each variant that transformers
computes the draft's `hidden` rows and float32 `logits` after all but the last of `ids`.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

from tests.golden.make_family_golden import network
from tests.oracles.checkpoints import write_tiny
from tests.oracles.draft_files import config_of, renamed, write_draft

HERE = Path(__file__).parent
LENGTH, TARGET_SEED = 12, 40  # tokens, the last of which is the anchor
SAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)


def features_of(target: torch.nn.Module, ids: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """Residual streams after `layers`, joined [T F]."""
    kept: dict[int, torch.Tensor] = {}

    def keep(i: int):
        def hook(_, __, out):
            kept[i] = out[0] if isinstance(out, tuple) else out

        return hook

    hooks = [target.model.layers[i].register_forward_hook(keep(i)) for i in layers]
    with torch.no_grad():
        target(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([kept[i] for i in layers], dim=-1).reshape(ids.shape[1], -1)


def draft_of(variant: str, folder: Path) -> MuseGlimmerAssistantModel:
    """The draft of a variant in transformers' class."""
    config = config_of(variant)
    write_draft(folder, variant)
    own = config["dflash_config"]
    given = MuseGlimmerAssistantConfig(
        **{key: config[key] for key in SAME},
        layer_types=config.get("layer_types", ["full_attention"] * config["num_hidden_layers"]),
        sliding_window=config.get("sliding_window", 4096),
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        block_size=own["block_size"],
        mask_token_id=own["mask_token_id"],
        target_layer_ids=own["target_layer_ids"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = MuseGlimmerAssistantModel(given).float().eval()
    tensors = load_file(folder / "model.safetensors")
    model.load_state_dict(renamed(tensors, "muse"), strict=True)
    return model


def main() -> None:
    config = json.loads(json.dumps(config_of()))
    own = config["dflash_config"]
    rng = np.random.default_rng(4)
    ids = rng.integers(0, 44, LENGTH)
    arrays = {"ids": ids.astype(np.int32)}
    with tempfile.TemporaryDirectory() as folder:
        target = network(write_tiny("qwen3", Path(folder) / "target", seed=TARGET_SEED))
        features = features_of(target, torch.tensor(ids[None]), own["target_layer_ids"])
        arrays["features"] = features.numpy()
        L, B = LENGTH - 1, own["block_size"]
        block = torch.tensor([[int(ids[-1])] + [own["mask_token_id"]] * (B - 1)])
        for variant in ("full", "inclusive"):
            draft = draft_of(variant, Path(folder) / variant)
            cache = DFlashCache(config=draft.config)
            cache.activate_past_recording()
            cache.set_previous_accepted_tokens(L)
            with torch.no_grad():
                hidden = draft(
                    noise_embeds=target.model.embed_tokens(block),
                    context_hidden_states=features[None, :L],
                    position_ids=torch.arange(L + B)[None],
                    past_key_values=cache,
                ).last_hidden_state[0]
                logits = target.lm_head(hidden)
            arrays[f"{variant}/hidden"] = hidden.numpy()
            arrays[f"{variant}/logits"] = logits.numpy()
            print(f"{variant:10} spread {logits.std():.2f}")
    np.savez_compressed(HERE / "draft.npz", **arrays)


if __name__ == "__main__":
    main()
