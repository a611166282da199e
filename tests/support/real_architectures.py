"""The published sizes of large models as configuration files, written over a small pipeline's own."""

import json
import shutil

CLIP_L = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
CLIP_G = {"hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20}
LONG = {"max_position_embeddings": 77, "vocab_size": 49408}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 24, "vocab_size": 32128}
T5_XXL |= {"feed_forward_proj": "gated-gelu", "is_gated_act": True, "dense_act_fn": "gelu_new"}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "latent_channels": 16,
    "norm_num_groups": 32,
    "mid_block_add_attention": True,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
SD35_MEDIUM = {
    "transformer": {
        "num_layers": 24,
        "num_attention_heads": 24,
        "attention_head_dim": 64,
        "sample_size": 128,
        "patch_size": 2,
        "in_channels": 16,
        "out_channels": 16,
        "joint_attention_dim": 4096,
        "caption_projection_dim": 1536,
        "pooled_projection_dim": 2048,
        "pos_embed_max_size": 384,
        "qk_norm": "rms_norm",
        "dual_attention_layers": list(range(13)),
    },
    "vae": VAE,
    "text_encoder": {**CLIP_L, **LONG, "projection_dim": 768},
    "text_encoder_2": {**CLIP_G, **LONG, "projection_dim": 1280},
    "text_encoder_3": T5_XXL,
    "tokenizer": {"model_max_length": 77},
    "tokenizer_2": {"model_max_length": 77},
}
FLUX_DEV = {
    "transformer": {
        "num_layers": 19,
        "num_single_layers": 38,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "in_channels": 64,
        "out_channels": None,
        "joint_attention_dim": 4096,
        "pooled_projection_dim": 768,
        "guidance_embeds": True,
        "axes_dims_rope": [16, 56, 56],
    },
    "vae": VAE,
    "text_encoder": {**CLIP_L, **LONG, "projection_dim": 768},
    "text_encoder_2": T5_XXL,
    "tokenizer": {"model_max_length": 77},
}


def write_architecture(folder, small, sizes):
    """A pipeline folder of these sizes without a weight, on the pattern of a small one."""
    shutil.copytree(small, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    for part, values in sizes.items():
        name = "tokenizer_config.json" if part.startswith("tokenizer") else "config.json"
        file = folder / part / name
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))
    return folder
