"""A small random Lumina2Pipeline folder: the family of the guide in docs/add_a_policy.md, which the package lacks."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model, GemmaTokenizer

from lit_vgrpo.hub import quiet_libraries
from lit_vgrpo.tiny.text import task_words

CHANNELS, TEXT_WIDTH = 4, 32
SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the degree of image-text alignment based on "
    "textual prompts or user <Prompt Start>"
)


def gemma_tokenizer():
    """Each word of the tiny task, and of the pipeline's system prompt, is one token; other text goes by the letter."""
    words = [f"▁{word}" for word in dict.fromkeys([*task_words(), *SYSTEM_PROMPT.split()])]
    merges = dict.fromkeys((word[:i], word[i]) for word in words for i in range(1, len(word)))
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*special, "▁", *map(chr, range(33, 127)), *("".join(pair) for pair in merges)]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    return GemmaTokenizer(vocab=vocabulary, merges=list(merges))


def build_lumina2(folder, seed=0):
    """16 x 16 pictures are 4 x 2 x 2 latents and one token; the pipeline's own size is 64 x 64."""
    tokenizer = gemma_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = Lumina2Transformer2DModel(
            sample_size=8,
            in_channels=CHANNELS,
            hidden_size=24,
            num_layers=2,
            num_refiner_layers=1,
            num_attention_heads=2,
            num_kv_heads=1,
            multiple_of=8,
            axes_dim_rope=(4, 4, 4),
            axes_lens=(64, 16, 16),
            cap_feat_dim=TEXT_WIDTH,
        )
        config = Gemma2Config(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=2 * TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            initializer_range=0.5,
        )
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            latent_channels=CHANNELS,
            norm_num_groups=4,
            scaling_factor=0.4,
            shift_factor=0.1,
            mid_block_add_attention=False,
        )
        pipeline = Lumina2Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
            vae=vae,
            text_encoder=Gemma2Model(config),
            tokenizer=tokenizer,
        )
    with quiet_libraries():
        pipeline.save_pretrained(folder)
    return Path(folder)
