"""A tokenizer and a small language model that need no download."""

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = "the a red blue old new cat dog bird tree sees likes finds knows and or not who what is it here there"
WORDS = TEXT.split()


def tokenizer() -> PreTrainedTokenizerFast:
    special = ["<pad>", "<unk>", "<s>", "</s>"]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(special + WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    made.chat_template = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    return made


def sentences(count: int) -> list[str]:
    return [" ".join(WORDS[(i * 7 + j * (1 + i % 5)) % len(WORDS)] for j in range(6 + i % 9)) for i in range(count)]


def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=2,
            num_attention_heads=4,
            pad_token_id=0,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
