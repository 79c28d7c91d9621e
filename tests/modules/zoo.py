"""Many small models with random weights, for what has to hold over all of them: where the channels of a site lie.

`TUNED` were looked at while the rule was made; `OTHERS` were only measured when it was finished.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

IDS, PIXELS, SAMPLES = "input_ids", "pixel_values", "input_values"


class Animal(NamedTuple):
    """A model and its arguments by name, both made anew at each call; random numbers are seeded by the caller."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]


def made(animal: Animal) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model, in eval mode, and its arguments. Vectors (biases, scales) are random too, not all zeros or ones."""
    torch.manual_seed(0)
    model, inputs = animal.make().eval(), animal.inputs()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model, inputs


def _hf(kind: str, inputs: Callable[[], dict[str, torch.Tensor]], model: str = "Model", **config: Any) -> Animal:
    def make() -> nn.Module:
        made = getattr(transformers, f"{kind}Config")(**config)
        network: nn.Module = getattr(transformers, f"{kind}{model}")(made)
        return network

    return Animal(make, inputs)


def _ids(name: str = IDS, length: int = 7) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randint(3, 60, (2, length))}


def _pixels(size: int = 32, name: str = PIXELS) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randn(2, 3, size, size)}


def _samples(length: int = 800, name: str = SAMPLES) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {name: torch.randn(2, length)}


def _both() -> dict[str, torch.Tensor]:
    return {IDS: torch.randint(3, 60, (2, 7)), "decoder_input_ids": torch.randint(3, 60, (2, 5))}


# A Transformer of text. Its sizes differ from each other and from the length of the text, as they do in real models.
_TEXT = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
_GROUPED = _TEXT | {"num_key_value_heads": 2}
_WIDE = _GROUPED | {"head_dim": 10}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_IMAGE = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4} | {
    "image_size": 32,
    "patch_size": 8,
}
_SPEECH = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "conv_dim": (16, 16, 20),
    "conv_kernel": (10, 3, 3),
    "conv_stride": (5, 2, 2),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_PAIR = {
    "vocab_size": 61,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
}


class Upside(nn.Module):
    """Building blocks of a U-Net: two widths that share one SiLU, a skip connection by concatenation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.middle, self.norm = nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(4, 12)
        self.up, self.last = nn.ConvTranspose2d(12, 8, 2, stride=2), nn.Conv2d(16, 3, 3, padding=1)
        self.silu = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.silu(self.first(x))
        deep = self.silu(self.down(wide))
        deep = self.silu(self.norm(self.middle(deep)))
        result: torch.Tensor = self.last(torch.cat([wide, self.silu(self.up(deep))], 1))
        return result


class LayerNorm2d(nn.LayerNorm):
    """A LayerNorm over the channels of [N, C, H, W], as ConvNeXt and MaxViT have it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class OwnNorm2d(nn.Module):
    """The same with parameters of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(width) + 0.5), nn.Parameter(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class Scale(nn.Module):
    """A factor for each channel in the last place, as residual branches have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class ChannelsLastBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU()
        self.down, self.scale = nn.Linear(3 * width, width), Scale(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, H, W, C]
        y = self.depthwise(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        result: torch.Tensor = x + self.scale(self.down(self.act(self.up(self.norm(y)))))
        return result


class ChannelsLastNet(nn.Module):
    """Images as [N, H, W, C] from end to end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.act = nn.Linear(3, 16), nn.Hardswish()
        self.blocks = nn.ModuleList(ChannelsLastBlock(16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.stem(x.movedim(1, -1)))
        for block in self.blocks:
            x = block(x)
        return x


class Attention2d(nn.Module):
    """Attention among the pixels of a map, as MaxViT and CoAtNet have it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = OwnNorm2d(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Softmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        q, k, v = self.qkv(self.norm(x).flatten(2).transpose(1, 2)).view(n, h * w, 3, 4, c // 4).permute(2, 0, 3, 1, 4)
        y = (self.drop(q @ k.transpose(-1, -2)) @ v).transpose(1, 2).reshape(n, h * w, c)
        result: torch.Tensor = x + self.out(y).transpose(1, 2).reshape(n, c, h, w)
        return result


class SqueezeExcite(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.reduce, self.act = nn.Conv2d(width, 4, 1), nn.ReLU()
        self.expand, self.gate = nn.Conv2d(4, width, 1), nn.Sigmoid()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gate(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


def _maxvit() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2, padding=1),
        LayerNorm2d(16),
        nn.GELU(),
        SqueezeExcite(16),
        Attention2d(16),
        nn.Conv2d(16, 24, 3, stride=2, padding=1),
        OwnNorm2d(24),
        nn.GELU(),
        Attention2d(24),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 10),
        nn.Tanh(),
    )


class Lengths(nn.Module):
    """Sound: convolutions over [N, C, T], then a GRU over [N, T, C]."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv1d(1, 12, 5, stride=2), nn.GELU(), nn.Conv1d(12, 20, 5, stride=2), nn.BatchNorm1d(20), nn.PReLU(20)
        )
        self.gru, self.head = nn.GRU(20, 16, batch_first=True), nn.Linear(16, 5)
        self.softmax = nn.LogSoftmax(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.gru(self.convs(x[:, None]).transpose(1, 2))
        result: torch.Tensor = self.softmax(self.head(y))
        return result


def _volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(8, 12, 3), nn.ELU()
    )


class PatchMixer(nn.Module):
    """MLP-Mixer: Linear layers over positions, [N, C, T], and over channels, [N, T, C]."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.act, self.down = nn.Linear(width, 40), nn.GELU(), nn.Linear(40, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.act(self.up(self.norm2(self.norm1(x)))))
        return result


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 8, stride=8)
        self.blocks = nn.ModuleList(PatchMixer(16, 24) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(24, 4, 40, batch_first=True)
    return nn.Sequential(nn.Embedding(61, 24), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))


def _own(make: Callable[[], nn.Module], inputs: Callable[[], torch.Tensor], name: str = "input") -> Animal:
    return Animal(make, lambda: {name: inputs()})


_CONVNEXT = {"num_stages": 4, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]}
_RESNET = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [1, 2]}
_WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
_CLIP_TEXT = _TEXT | {"max_position_embeddings": 16, "eos_token_id": 2}

TUNED: dict[str, Animal] = {
    "llama": _hf("Llama", _ids(), **_GROUPED),
    "qwen3": _hf("Qwen3", _ids(), **_WIDE),
    "gemma3": Animal(lambda: transformers.Gemma3TextModel(transformers.Gemma3TextConfig(**_WIDE)), _ids()),
    "gpt2": _hf("GPT2", _ids(), vocab_size=61, n_embd=24, n_layer=2, n_head=4),
    "bert": _hf("Bert", _ids(), **_TEXT),
    "t5": _hf("T5", _both, vocab_size=61, d_model=24, d_kv=6, d_ff=40, num_layers=2, num_heads=4),
    "mamba": _hf("Mamba", _ids(), vocab_size=61, hidden_size=24, state_size=5, num_hidden_layers=2),
    "mixtral": _hf("Mixtral", _ids(), **_GROUPED, num_local_experts=4),
    "qwen3 moe": _hf("Qwen3Moe", _ids(), **_WIDE, **_EXPERTS),
    "bloom": _hf("Bloom", _ids(), vocab_size=61, hidden_size=24, n_layer=2, n_head=4),
    "rwkv": _hf("Rwkv", _ids(), vocab_size=61, hidden_size=24, num_hidden_layers=2, attention_hidden_size=24),
    "whisper": _hf(
        "Whisper",
        lambda: {
            "input_features": torch.randn(2, 8, 60),
            "decoder_input_ids": torch.randint(3, 60, (2, 5)),
        },
        **_PAIR,
        num_mel_bins=8,
        max_source_positions=30,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    ),
    "wav2vec2": _hf("Wav2Vec2", _samples(), **_SPEECH),
    "wav2vec2, layer norm": _hf(
        "Wav2Vec2", _samples(), **_SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True
    ),
    "encodec": _hf(
        "Encodec",
        lambda: {SAMPLES: torch.randn(2, 1, 1280)},
        num_filters=4,
        hidden_size=16,
        codebook_size=32,
        codebook_dim=16,
        upsampling_ratios=[4, 2],
        num_lstm_layers=1,
    ),
    "vit": _hf("ViT", _pixels(), **_IMAGE),
    "convnext": _hf("ConvNext", _pixels(40), **_CONVNEXT),
    "convnext v2": _hf("ConvNextV2", _pixels(40), **_CONVNEXT),
    "swin": _hf("Swin", _pixels(), **_WINDOWS),
    "segformer": _hf(
        "Segformer",
        _pixels(),
        "ForSemanticSegmentation",
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        decoder_hidden_size=20,
        num_labels=5,
    ),
    "resnet": _hf("ResNet", _pixels(), **_RESNET),
    "mobilenet v2": _hf("MobileNetV2", _pixels(), depth_multiplier=0.25, image_size=32),
    "clip": _hf(
        "CLIP",
        lambda: _ids()() | _pixels()(),
        text_config=_CLIP_TEXT,
        vision_config=_IMAGE,
        projection_dim=20,
    ),
    "unet, one SiLU": _own(Upside, lambda: torch.randn(2, 3, 16, 16), "x"),
    "channels last": _own(ChannelsLastNet, lambda: torch.randn(2, 3, 9, 11), "x"),
    "maxvit": _own(_maxvit, lambda: torch.randn(2, 3, 20, 24)),
    "sound": _own(Lengths, lambda: torch.randn(2, 90), "x"),
    "volumes": _own(_volumes, lambda: torch.randn(2, 3, 11, 12, 13)),
    "encoder of torch.nn": _own(_encoder, lambda: torch.randint(61, (2, 7))),
}

OTHERS: dict[str, Animal] = {
    "falcon": _hf("Falcon", _ids(), vocab_size=61, hidden_size=24, num_hidden_layers=2, num_attention_heads=4),
    "opt": _hf(
        "OPT",
        _ids(),
        vocab_size=61,
        hidden_size=24,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=24,
    ),
    "phi": _hf("Phi", _ids(), **(_TEXT | {"hidden_size": 32})),
    "bart": _hf("Bart", _ids(), **_PAIR),
    "deberta v2": _hf("DebertaV2", _ids(), **_TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "deberta": _hf("Deberta", _ids(), **_TEXT),
    "gpt neox": _hf("GPTNeoX", _ids(), **_TEXT),
    "mamba2": _hf(
        "Mamba2",
        _ids(),
        vocab_size=61,
        hidden_size=24,
        state_size=5,
        num_heads=6,
        head_dim=8,
        n_groups=2,
        num_hidden_layers=2,
        chunk_size=4,
    ),
    "olmo2": _hf("Olmo2", _ids(), **_GROUPED),
    "xlnet": _hf("XLNet", _ids(), vocab_size=61, d_model=24, n_layer=2, n_head=4, d_inner=40),
    "albert": _hf("Albert", _ids(), **_TEXT, embedding_size=10),
    "fnet": _hf("FNet", _ids(), **{k: v for k, v in _TEXT.items() if k != "num_attention_heads"}),
    "squeezebert": _hf("SqueezeBert", _ids(), **_TEXT, embedding_size=24),
    "esm": _hf("Esm", _ids(), **_TEXT, pad_token_id=1, position_embedding_type="rotary"),
    "gpt oss": _hf("GptOss", _ids(), **_WIDE, num_local_experts=4),
    "regnet": _hf(
        "RegNet", _pixels(), embedding_size=8, hidden_sizes=[16, 24], depths=[1, 2], groups_width=8, layer_type="y"
    ),
    "mobilenet v1": _hf("MobileNetV1", _pixels(), depth_multiplier=0.25, image_size=32),
    "efficientnet": _hf(
        "EfficientNet",
        _pixels(),
        image_size=32,
        width_coefficient=0.25,
        depth_coefficient=0.3,
        hidden_dim=320,
    ),
    "poolformer": _hf(
        "PoolFormer",
        _pixels(64),
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
    ),
    "mobilevit": _hf(
        "MobileViT",
        _pixels(64),
        image_size=64,
        hidden_sizes=[12, 16, 20],
        neck_hidden_sizes=[4, 8, 12, 16, 20, 24, 40],
        num_attention_heads=2,
    ),
    "beit": _hf("Beit", _pixels(), **_IMAGE),
    "dinov2": _hf("Dinov2", _pixels(), **{k: v for k, v in _IMAGE.items() if k != "intermediate_size"}),
    "focalnet": _hf(
        "FocalNet", _pixels(), image_size=32, embed_dim=8, depths=[1, 2], focal_levels=[2, 2], focal_windows=[3, 3]
    ),
    "pvt v2": _hf(
        "PvtV2",
        _pixels(64),
        image_size=64,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 2, 4, 4],
        mlp_ratios=[2, 2, 2, 2],
    ),
    "swin v2": _hf("Swinv2", _pixels(), **_WINDOWS),
    "bit": _hf("Bit", _pixels(), embedding_size=8, hidden_sizes=[16, 32], depths=[1, 2], num_groups=4),
    "yolos": _hf("Yolos", _pixels(), **(_IMAGE | {"image_size": [32, 32]}), num_detection_tokens=5),
    "hubert": _hf("Hubert", _samples(), **_SPEECH),
    "wavlm": _hf("WavLM", _samples(), **_SPEECH),
    "data2vec audio": _hf("Data2VecAudio", _samples(), **_SPEECH),
    "dac": _hf(
        "Dac",
        lambda: {SAMPLES: torch.randn(2, 1, 640)},
        encoder_hidden_size=4,
        downsampling_ratios=[4, 2],
        decoder_hidden_size=16,
        upsampling_ratios=[4, 2],
        n_codebooks=2,
        codebook_size=32,
        codebook_dim=4,
        hidden_size=16,
    ),
    "videomae": _hf(
        "VideoMAE",
        lambda: {PIXELS: torch.randn(2, 4, 3, 32, 32)},
        **_IMAGE,
        num_frames=4,
        tubelet_size=2,
    ),
    "patches": _own(Patches, lambda: torch.randn(2, 3, 32, 40), "x"),
}
