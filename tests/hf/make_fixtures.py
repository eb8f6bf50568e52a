"""Make the expected values of the Hugging Face parity tests, with transformers itself.

    python -m venv hf && hf/bin/pip install torch==2.13.0 transformers numpy safetensors
    hf/bin/python tests/hf/make_fixtures.py                  # rewrites the committed .npz files
    hf/bin/python tests/hf/make_fixtures.py --out DIR --seed 7   # other weights, elsewhere

The script needs torch and transformers but neither JAX nor this package, so it runs in an
environment of its own (Python 3.11 has a CPU wheel of torch on PyPI, and the package needs 3.12).
Each file holds its configuration and the versions that made it, as JSON in `meta`.

Layer files (`qwen3_next_layer.npz`, `qwen3_5_layer.npz`): one Gated DeltaNet layer in float32 with
num_value_heads != num_key_heads and key_head_dim != value_head_dim.

    weights/NAME     as transformers names and lays them out
    x, y             [2, 70, hidden] without a cache
    x_decode         [2, 32, hidden]: fed one token at a time after x, x cut in pieces of 41 and 29
    y_pieces         [2, 70, hidden] out of the two cached pieces, y_decode of the 32 steps
    state            [2, nv, KD, VD] recurrent state after the last step
    x_padded         [4, 37, hidden], left_mask and right_mask [4, 37], y_left and y_right of them
    y_bfloat16, y_decode_bfloat16, state_bfloat16   the same layer and inputs cast to bfloat16

Model file (`qwen3_5_text.npz`): a four-layer Qwen3.5 text model, its greedy continuations of three
prompts by `generate`, and the logits over prompt and continuation of the first.
"""

# pyright: reportMissingImports=false
# (torch and transformers live in another environment)

import argparse
import json
import pathlib

import numpy as np
import torch
import transformers
from transformers import DynamicCache, Qwen3_5ForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

LINEAR = {
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
PIECES = (41, 29)
DECODE_STEPS = 32
PADDED_LENGTHS = (37, 20, 3, 1)
PROMPT_LENGTHS = (5, 17, 66)
NEW_TOKENS = 64


def randomize(module, generator):
    """Weights for which every part matters: norms off one, decays over 0.3..1, sharp logits."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            noise = torch.randn(parameter.shape, generator=generator)
            if leaf == "A_log":
                parameter.copy_(torch.log(torch.empty_like(parameter).uniform_(0.05, 2.0, generator=generator)))
            elif leaf == "dt_bias":
                parameter.copy_(noise - 1.5)
            elif parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)


def small_config(config_class, **more):
    return config_class(hidden_size=32, num_hidden_layers=1, layer_types=["linear_attention"], **LINEAR, **more)


def run_layer(layer, config, x, x_decode):
    """Outputs of the cached pieces, of the decode steps, and the last recurrent state."""
    cache = DynamicCache(config=config)
    pieces = [layer(piece, cache=cache) for piece in torch.split(x, PIECES, dim=1)]
    steps = [layer(x_decode[:, t : t + 1], cache=cache) for t in range(x_decode.shape[1])]
    return torch.cat(pieces, 1), torch.cat(steps, 1), cache.get_recurrent_state(0, state_idx=0)


def layer_fixture(config, layer_class, generator):
    layer = layer_class(config, 0).eval()
    randomize(layer, generator)
    arrays = {f"weights/{name}": value for name, value in layer.state_dict().items()}

    x = torch.randn(2, sum(PIECES), config.hidden_size, generator=generator)
    x_decode = torch.randn(2, DECODE_STEPS, config.hidden_size, generator=generator)
    y_pieces, y_decode, state = run_layer(layer, config, x, x_decode)
    arrays |= {
        "x": x,
        "x_decode": x_decode,
        "y": layer(x),
        "y_pieces": y_pieces,
        "y_decode": y_decode,
    }
    arrays["state"] = state.clone()

    longest = max(PADDED_LENGTHS)
    x_padded = torch.randn(len(PADDED_LENGTHS), longest, config.hidden_size, generator=generator)
    position, length = torch.arange(longest), torch.tensor(PADDED_LENGTHS)[:, None]
    left_mask, right_mask = position >= longest - length, position < length
    arrays |= {"x_padded": x_padded, "left_mask": left_mask, "right_mask": right_mask}
    arrays["y_left"] = layer(x_padded, attention_mask=left_mask)
    arrays["y_right"] = layer(x_padded, attention_mask=right_mask)

    layer.to(torch.bfloat16)
    x, x_decode = x.to(torch.bfloat16), x_decode.to(torch.bfloat16)
    arrays["y_bfloat16"] = layer(x)
    _, arrays["y_decode_bfloat16"], state = run_layer(layer, config, x, x_decode)
    arrays["state_bfloat16"] = state.clone()
    return arrays


def text_config():
    return Qwen3_5TextConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
        },
        attn_implementation="eager",
        **(LINEAR | {"linear_value_head_dim": 24, "linear_num_value_heads": 4}),
    )


def model_fixture(config, generator):
    margin = 0.0
    # Equal greedy tokens mean something only where no step is decided by rounding.
    while margin < 1e-3:
        model = Qwen3_5ForCausalLM(config).eval()
        randomize(model, generator)
        arrays = {f"weights/{name}": value.clone() for name, value in model.state_dict().items()}
        margins = []
        for i, length in enumerate(PROMPT_LENGTHS):
            prompt = torch.randint(config.vocab_size, (1, length), generator=generator)
            tokens = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                min_new_tokens=NEW_TOKENS,
                max_new_tokens=NEW_TOKENS,
            )[0]
            logits = model(tokens[None]).logits[0]
            top2 = logits[length - 1 : -1].topk(2).values
            margins.append(float((top2[:, 0] - top2[:, 1]).min()))
            arrays |= {f"prompt_{i}": prompt[0], f"greedy_{i}": tokens[length:]}
            if i == 0:
                arrays["logits_0"] = logits
        margin = min(margins)
    return arrays, {"smallest_margin": margin}


def save(path, config, arrays, **meta):
    meta |= {
        "config": config.to_dict(),
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
    }

    def to_numpy(tensor):
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()

    arrays = {name: to_numpy(tensor) for name, tensor in arrays.items()}
    np.savez_compressed(path, meta=json.dumps(meta, default=str), **arrays)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    # The projections of a 32-wide layer summed by different thread counts differ in the last bits.
    torch.set_num_threads(1)

    for name, config, layer_class in (
        ("qwen3_next_layer", small_config(Qwen3NextConfig, num_experts=0), Qwen3NextGatedDeltaNet),
        ("qwen3_5_layer", small_config(Qwen3_5TextConfig), Qwen3_5GatedDeltaNet),
    ):
        save(
            args.out / f"{name}.npz",
            config,
            layer_fixture(config, layer_class, generator),
            seed=args.seed,
        )
    config = text_config()
    arrays, meta = model_fixture(config, generator)
    save(args.out / "qwen3_5_text.npz", config, arrays, seed=args.seed, **meta)


if __name__ == "__main__":
    main()
