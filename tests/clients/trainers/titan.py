"""torchtitan's trainer, small and on a CPU, with gloo. What it asks of a GPU is put in its place here."""

from dataclasses import replace
from types import SimpleNamespace

import torch

torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan would take CUDA
torch.cpu.current_device = lambda: 0
torch.cpu.get_device_name = lambda _: "cpu"
torch.cpu.get_device_properties = lambda _: SimpleNamespace(total_memory=1 << 30)
torch.cpu.reset_peak_memory_stats = torch.cpu.empty_cache = lambda: None
torch.cpu.memory_stats = lambda _: {}

import torchtitan.train  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.config import JobConfig  # noqa: E402
from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec  # noqa: E402
from torchtitan.protocols.train_spec import register_train_spec  # noqa: E402

torchtitan.train.time = SimpleNamespace(perf_counter=torchtitan.train.time.perf_counter, sleep=lambda _: None)


class Tokens(torch.utils.data.IterableDataset):
    """Sequences that count on from anywhere; each rank's are its own."""

    def __init__(self, rank: int, length: int):
        self.numbers, self.length = torch.Generator().manual_seed(rank), length

    def __iter__(self):
        while True:
            row = (torch.randint(97, (1,), generator=self.numbers) + 5 * torch.arange(self.length + 1)) % 97
            yield {"input": row[:-1]}, row[1:]

    def state_dict(self):
        return {}


def loader(dp_world_size, dp_rank, job_config, **_):
    training = job_config.training
    return ParallelAwareDataloader(
        Tokens(dp_rank, training.seq_len), dp_rank, dp_world_size, batch_size=training.local_batch_size
    )


def trainer(compiles: bool = False, **degrees: int) -> torchtitan.train.Trainer:
    args = TransformerModelArgs(dim=64, n_layers=3, n_heads=4, vocab_size=128, multiple_of=32)
    spec = replace(get_train_spec(), model_args={"small": args}, build_dataloader_fn=loader, build_tokenizer_fn=None)
    register_train_spec("small", replace(spec, state_dict_adapter=None))
    config = JobConfig()
    config.model.name = config.model.flavor = "small"
    config.training.local_batch_size, config.training.seq_len, config.training.steps = 4, 32, 24
    config.lr_scheduler.warmup_steps, config.metrics.log_freq = 4, 1
    config.compile.enable = compiles
    for name, degree in degrees.items():
        setattr(config.parallelism, name, degree)
    return torchtitan.train.Trainer(config)
