"""TRL's GRPOTrainer on the bench's task: run by `benchmarks.rival` with the interpreter of TRL's own environment.

    python rival_trl.py '{"hidden": 64, ...}'     the fields of Case

Imports nothing of ours. Prints one JSON line: step times, rewards, CPU seconds, peak memory. The same model shape (a Llama
with tied embeddings), prompts, batch, answer length, optimizer and loss settings as our side.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")


@dataclass(frozen=True)
class Case:
    """One comparison."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    vocab: int
    prompts: int
    answers: int
    #: Tokens of every answer.
    new_tokens: int
    steps: int
    learning_rate: float
    entropy: float
    seed: int
    #: Steps left out of the rates.
    warm_up: int
    #: Mean reward, over `window` steps, at which the time is taken; the run ends there. None: all steps.
    target: float | None
    window: int
    #: `copy`: share of the right characters; `inPrompt`: share of tokens that the prompt holds.
    reward: str


CHARACTERS = "0123456789=.+-:"


def main() -> None:
    """Train and report."""
    case = Case(**json.loads(sys.argv[1]))
    import torch

    torch.set_num_threads(1)
    import trl
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(case.seed)
    config = LlamaConfig(
        vocab_size=case.vocab,
        hidden_size=case.hidden,
        intermediate_size=case.ffn,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        num_key_value_heads=case.heads,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    marks: list[tuple[float, float]] = []
    rewards: list[float] = []

    def reward(completion_ids: list[list[int]], digits: list[str], **_: object) -> list[float]:
        encoded = [[3 + CHARACTERS.index(c) for c in text] for text in digits]
        score = copied if case.reward == "copy" else in_prompt
        return [score(ids, prompt) for ids, prompt in zip(completion_ids, encoded, strict=True)]

    def noted(completion_ids: list[list[int]], digits: list[str], **rest: object) -> list[float]:
        scores = reward(completion_ids, digits, **rest)
        rewards.append(sum(scores) / len(scores))
        return scores

    class Marks(TrainerCallback):  # type: ignore[misc,unused-ignore]
        """Notes the time of every step and ends the run at the target."""

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            marks.append((time.perf_counter(), time.process_time()))
            recent = rewards[-case.window :]
            if case.target is not None and len(recent) == case.window and sum(recent) / len(recent) >= case.target:
                control.should_training_stop = True  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory(prefix="rljob-bench-trl-") as output:
        settings = GRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=case.prompts * case.answers,
            gradient_accumulation_steps=1,
            num_generations=case.answers,
            max_completion_length=case.new_tokens,
            # No answer ends early, as on our side.
            generation_kwargs={"min_new_tokens": case.new_tokens},
            max_steps=case.steps,
            learning_rate=case.learning_rate,
            lr_scheduler_type="constant",
            beta=0.0,
            entropy_coef=case.entropy,
            temperature=1.0,
            epsilon=0.2,
            epsilon_high=0.28,
            adam_beta2=0.95,
            weight_decay=0.0,
            max_grad_norm=1.0,
            scale_rewards="group",
            logging_steps=10**6,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            gradient_checkpointing=False,
            mask_truncated_completions=False,
            seed=case.seed,
            shuffle_dataset=False,
        )
        trainer = GRPOTrainer(
            model=LlamaForCausalLM(config),
            reward_funcs=noted,
            args=settings,
            train_dataset=Dataset.from_list(rows(case)),
            processing_class=tokenizer(case.vocab),
            callbacks=[Marks()],
        )
        began = (time.perf_counter(), time.process_time())
        trainer.train()
    warm = marks[case.warm_up - 1] if case.warm_up else began
    steps = len(marks) - case.warm_up
    print(
        json.dumps(
            {
                "version": trl.__version__,
                "parameters": sum(p.numel() for p in trainer.model.parameters()),
                "steps": len(marks),
                "seconds_per_step": (marks[-1][0] - warm[0]) / steps,
                "cpu_seconds_per_step": (marks[-1][1] - warm[1]) / steps,
                "seconds": marks[-1][0] - began[0],
                "cpu_seconds": marks[-1][1] - began[1],
                "rewards": rewards,
                "peak_megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


def rows(case: Case) -> list[dict[str, str]]:
    """All three-digit numbers, epoch after epoch, each in another order."""
    rng = random.Random(case.seed)  # noqa: S311 - a benchmark
    texts: list[str] = []
    while len(texts) < (case.steps + 1) * case.prompts:
        epoch = [f"{number:03d}" for number in range(1000)]
        rng.shuffle(epoch)
        texts += epoch
    return [{"prompt": f"{text}=", "digits": text} for text in texts]


def copied(ids: list[int], prompt: list[int]) -> float:
    """The share of tokens that are right, over the longer of the two."""
    return sum(a == b for a, b in zip(ids, prompt, strict=False)) / max(len(ids), len(prompt))


def in_prompt(ids: list[int], prompt: list[int]) -> float:
    """The share of tokens that the prompt's number holds."""
    return sum(token in prompt for token in ids) / len(ids)


def tokenizer(vocab: int) -> object:
    """One token per character, the same ids as our digit tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<bos>": 1, "<eos>": 2} | {c: i for i, c in enumerate(CHARACTERS, start=3)}
    ids |= {f"<{i}>": i for i in range(len(ids), vocab)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))  # noqa: S106 - a token of the vocabulary
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = {f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")}
    return PreTrainedTokenizerFast(tokenizer_object=core, padding_side="left", **special)


if __name__ == "__main__":
    main()
