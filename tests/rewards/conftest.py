import pytest
import scorer_files


@pytest.fixture(scope="session")
def clip_folder(tmp_path_factory):
    """A random CLIP model with its processor, as saved by transformers; its tokenizer takes any text."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

    folder = tmp_path_factory.mktemp("clip")
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(letter + "</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = CLIPTokenizer(vocab=vocab, merges=[])
    image_processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, resample=3)
    CLIPProcessor(image_processor=image_processor, tokenizer=tokenizer).save_pretrained(folder)

    start, end = vocab["<|startoftext|>"], vocab["<|endoftext|>"]
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {"vocab_size": len(tokens), "max_position_embeddings": 24}
    ids = {"bos_token_id": start, "eos_token_id": end, "pad_token_id": end}
    config = CLIPConfig(
        text_config={**layers, **text, **ids},
        vision_config={**layers, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = CLIPModel(config)
        for name, weight in model.named_parameters():
            if weight.ndim > 1:  # the usual initialisation is so small that all inputs look alike
                torch.nn.init.normal_(weight, std=0.02 if "position" in name else 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def image_reward_folder(tmp_path_factory):
    """A random ImageReward under its published names, with BERT's tokenizer."""
    return scorer_files.write_image_reward(tmp_path_factory.mktemp("image_reward"))


@pytest.fixture(scope="session")
def aesthetic_file(tmp_path_factory):
    """A random head of the LAION predictor, for ``clip_folder``."""
    return scorer_files.write_aesthetic(tmp_path_factory.mktemp("aesthetic"))


@pytest.fixture(scope="session")
def hps_checkpoint(tmp_path_factory):
    """A random HPS v2.1: its folder, and the name of its architecture in open_clip."""
    return scorer_files.write_hps(tmp_path_factory.mktemp("hps"))


@pytest.fixture(scope="session")
def tiny_reward(clip_folder, aesthetic_file, hps_checkpoint, image_reward_folder):
    """``tiny_reward(PickScore, batch_size=2)``: a reward on its tiny checkpoint; keywords override."""
    clip, image_reward, (hps, architecture) = str(clip_folder), str(image_reward_folder), hps_checkpoint
    tiny = {
        "PickScore": {"checkpoint": clip},
        "CLIPScore": {"checkpoint": clip},
        "HPSv2": {"checkpoint": str(hps), "model": architecture},
        "ImageReward": {"checkpoint": image_reward, "tokenizer": image_reward},
        "AestheticScore": {"checkpoint": str(aesthetic_file), "clip": clip},
    }
    return lambda kind, **changes: kind(**{**tiny[kind.__name__], **changes})
