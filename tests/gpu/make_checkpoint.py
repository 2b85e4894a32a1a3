"""Writes a random checkpoint of full shape in Hugging Face layout, on the GPU machine, where 1.5 GB need not travel.

Usage: make_checkpoint.py NAME OUT_DIR     NAME: qwen3.5-0.8b | article-0.8b | qwen3-0.6b | few-columns | heads-128
heads-128 has the article's heads and is small, and so is few-columns: some clusters of the persistent plan have heads and
nothing of an MLP, so that a block's attention layers follow one another within one turn of its ring.
Weights as tests/golden's small checkpoints have them: norms off their identity, gates and decays spread out, projections
scaled by 1 / sqrt(fan-in), so that every term matters and activations keep their size. bf16, with the real checkpoint's
fp32 exceptions. No tokenizer: such a folder serves token ids.
"""
import json
import os
import sys

if len(sys.argv) < 3:
    sys.exit(__doc__)

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3Config

SHAPES = {
    "qwen3.5-0.8b": (Qwen3_5TextConfig, dict(
        vocab_size=248320, hidden_size=1024, intermediate_size=3584, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=2, head_dim=256, linear_num_key_heads=16, linear_num_value_heads=16,
        linear_key_head_dim=128, linear_value_head_dim=128, tie_word_embeddings=True, max_position_embeddings=32768,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                         "mrope_section": [11, 11, 10], "mrope_interleaved": True})),
    "article-0.8b": (LlamaConfig, dict(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "few-columns": (LlamaConfig, dict(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "heads-128": (LlamaConfig, dict(
        vocab_size=512, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=32768, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3-0.6b": (Qwen3Config, dict(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
        max_position_embeddings=40960, rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
}


def randomize(model, generator):
    zero_centred = "qwen3_5" in model.config.model_type
    with torch.no_grad():
        for name, p in model.named_parameters():
            r = torch.randn(p.shape, generator=generator, device=p.device)
            if name.endswith("A_log"):
                p.copy_(torch.rand(p.shape, generator=generator, device=p.device) * 3 - 1.5)
            elif name.endswith("dt_bias"):
                p.copy_(r * 0.7 - 1.5)
            elif "conv1d" in name:
                p.copy_(r * 0.4)
            elif "norm" in name:
                p.copy_(r * 0.25 + (0.0 if zero_centred and "linear_attn.norm" not in name else 1.0))
            elif "embed_tokens" in name:
                p.copy_(r * 0.6)
            else:
                p.copy_(r * (1.3 / p.shape[-1] ** 0.5))
            p.copy_(p.bfloat16().float())


def main():
    name, out = sys.argv[1], sys.argv[2]
    config_class, fields = SHAPES[name]
    config = config_class(**fields)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomize(model, torch.Generator("cuda").manual_seed(20261130))
    model.tie_weights()
    os.makedirs(out, exist_ok=True)
    keep_fp32 = lambda k: k.endswith("A_log") or k.endswith("linear_attn.norm.weight")
    state = {k: (v.float() if keep_fp32(k) else v.bfloat16()).cpu().contiguous()
             for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, f"{out}/model.safetensors", metadata={"format": "pt"})
    described = json.loads(config.to_json_string(use_diff=False))
    described.pop("_attn_implementation", None)
    described.update(dtype="bfloat16", architectures=[type(model).__name__])
    with open(f"{out}/config.json", "w") as f:
        json.dump(described, f, indent=1, sort_keys=True)
    print(f"{out}: {sum(v.numel() for v in state.values()) / 1e6:.1f}M weights", flush=True)


main()
