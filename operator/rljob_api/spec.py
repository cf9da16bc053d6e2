"""`RLJob.spec`: what users write. Field docstrings are the text of `kubectl explain`; defaults stand in the CRD schema."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from .base import ApiModel, Count, Flag, NonNegativeDecimal, Path, Quantity, Seconds, Size
from .spec_task import Algorithm, Data, Environment, Validation

ExitStatus = Annotated[int, Field(strict=True, ge=0, le=255)]
DnsName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


LEAST_TEMPERATURE = "0.0001"
"""Of sampling: logits are divided by it in float32."""


class Resources(ApiModel):
    """CPU and memory of one pod: both are requested, memory is also the limit."""

    cpu: Quantity = "1"
    """CPU request, in cores (500m is half a core)."""
    memory: Quantity = "3Gi"
    """Memory request and limit, in bytes."""


class HeadResources(ApiModel):
    """CPU and memory of the head pod: both are requested, memory is also the limit."""

    cpu: Quantity = "500m"
    """CPU request, in cores."""
    memory: Quantity = "2Gi"
    """Memory request and limit, in bytes."""


class Head(ApiModel):
    """The head pod: Ray's head, the driver and the collector; it never gets a GPU."""

    resources: HeadResources = HeadResources()
    """CPU and memory of the head pod."""


class Trainer(ApiModel):
    """The pods: one CPU-only head and one worker pod per node."""

    image: Annotated[str, Field(min_length=1, max_length=512)]
    """Container image with the workload (images/workload), used by head and workers."""
    nodes: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1
    """Number of worker pods. The head is one pod more."""
    gpus_per_node: Annotated[int, Field(strict=True, ge=0, le=64)] = 0
    """GPUs of each worker pod, one rank per GPU. 0 means CPU ranks over gloo."""
    ranks_per_node: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    """Ranks in each worker pod when gpusPerNode is 0; not read otherwise."""
    gpu_memory: Quantity | None = None
    """Memory of one GPU, in bytes; used only for estimates."""
    resources: Resources = Resources()
    """CPU and memory of each worker pod, beside its GPUs."""
    head: Head = Head()
    """The head pod."""
    seed: Annotated[int, Field(strict=True, ge=0, le=2**31 - 1)] = 0
    """Seed of weights and sampling."""
    template: dict[str, Any] = Field(default_factory=dict)
    """Pod template laid under ours, for head and workers: env, volumes, nodeSelector, tolerations and the like."""


class HuggingFace(ApiModel):
    """A Hugging Face model directory."""

    path: Path
    """Directory with config.json and *.safetensors, as mounted in head and worker pods (trainer.template)."""


class Shape(ApiModel):
    """Sizes of a decoder-only transformer."""

    layers: Size
    """Transformer blocks (attention plus feed-forward)."""
    hidden_size: Annotated[int, Field(strict=True, ge=1, le=1_048_576)]
    """Width of the residual stream."""
    attention_heads: Size
    """Attention heads per layer."""
    query_groups: Size | None = None
    """Key/value heads per layer (grouped-query attention); attentionHeads when unset."""
    ffn_hidden_size: Annotated[int, Field(strict=True, ge=1, le=4_194_304)]
    """Inner width of the feed-forward block."""
    vocab_size: Annotated[int, Field(strict=True, ge=1, le=16_777_216)]
    """Rows of the embedding before padding."""
    experts: Size | None = None
    """Experts per mixture-of-experts layer; unset means a dense model."""
    top_k: Size | None = None
    """Experts that each token is routed to."""
    hybrid_pattern: Annotated[str, Field(max_length=4096, pattern=r"^[M*E-]+$")] | None = None
    """Layer pattern of a hybrid model: M is Mamba, * attention, - feed-forward, E experts."""


class Model(ApiModel):
    """The policy model; exactly one of preset and huggingFace."""

    preset: Literal["tiny"] | None = None
    """A model that comes with the workload, initialised from trainer.seed: tiny (2 layers, 64 wide)."""
    hugging_face: HuggingFace | None = None
    """First weights from a Hugging Face directory (Llama, Mixtral, Qwen2, Qwen3); a resume needs its config.json only."""
    shape: Shape | None = None
    """The model's sizes. With a preset they replace the preset's; with huggingFace they are checked against its config.json."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters in the forward pass."""
    transformer: Literal["Local", "TransformerEngine"] = "Local"
    """Implementation of the layers: Megatron's local one, or Transformer Engine's (needs a GPU)."""
    allow_inference_optimized_training: Flag = False
    """Consent to train a model that was built with inference-optimized layers."""


class Parallelism(ApiModel):
    """How the training ranks share one model: sizes of Megatron's process groups."""

    tensor: Size = 1
    """Tensor-parallel size (TP)."""
    pipeline: Size = 1
    """Pipeline-parallel size (PP)."""
    virtual_pipeline: Size = 1
    """Model chunks per pipeline stage."""
    context: Size = 1
    """Context-parallel size (CP)."""
    expert: Size = 1
    """Expert-parallel size (EP)."""
    expert_tensor: Size | None = None
    """Tensor-parallel size inside experts (ETP); tensor when unset, as in Megatron."""
    sequence: Flag = False
    """Sequence parallelism: norms and dropouts are split over the tensor-parallel group."""


class GenerationParallelism(ApiModel):
    """The layout that generation would use. It shares weights and process groups with training, so it has to be the same."""

    tensor: Size | None = None
    """Tensor-parallel size of generation; training's when unset, and refused when different."""
    pipeline: Size | None = None
    """Pipeline-parallel size of generation; training's when unset, and refused when different."""
    context: Size | None = None
    """Context-parallel size of generation; has no effect on decoding, a difference is a warning."""
    expert: Size | None = None
    """Expert-parallel size of generation; training's when unset, and refused when different."""
    expert_tensor: Size | None = None
    """Expert tensor-parallel size of generation; training's when unset, and refused when different."""


class KvCache(ApiModel):
    """The engine's key/value cache."""

    mode: Literal["Persist", "Offload", "Recompute"] = "Persist"
    """What happens to it while training runs: it stays, moves to host memory, or is dropped and computed again."""
    size: Quantity = "256Mi"
    """Bytes per rank."""


class Server(ApiModel):
    """The OpenAI-compatible HTTP server of each data-parallel replica."""

    enabled: Flag = False
    """Start the server; agents need it."""
    port: Annotated[int, Field(strict=True, ge=0, le=65535)] = 0
    """Port of the first replica's server, on the head; further replicas count up from it. 0 takes free ones."""


class Generation(ApiModel):
    """How answers are generated."""

    parallelism: GenerationParallelism | None = None
    """Generation's layout; training's when unset."""
    max_new_tokens: Annotated[int, Field(strict=True, ge=1, le=1_048_576)]
    """Longest answer, in tokens."""
    max_sequence_length: Annotated[int, Field(strict=True, ge=2, le=4_194_304)]
    """Prompt plus answer, in tokens."""
    max_requests: Annotated[int, Field(strict=True, ge=1, le=65_536)] = 96
    """Engine slots (answers generated at the same time) per replica."""
    answer_timeout_seconds: Seconds = 120
    """Time for one answer; past it the prompt's group has failed once. An agent's rollout has it from when it is taken."""
    temperature: NonNegativeDecimal = "1.0"
    """Sampling temperature."""
    kv_cache: KvCache = KvCache()
    """The engine's key/value cache."""
    offload_training_buffers: Flag = False
    """Move gradients and optimizer state to host memory while generating."""
    max_in_flight_prompts: Annotated[int, Field(strict=True, ge=1, le=1_048_576)] | None = None
    """Prompts answered at the same time; promptsPerStep * maxTrajectoryAgeSteps when unset."""
    inference_optimized: Flag = False
    """Build the dual-mode model with Megatron's inference-optimized layers."""
    server: Server = Server()
    """The OpenAI-compatible HTTP server."""


class Volume(ApiModel):
    """A directory on a persistent volume."""

    claim_name: DnsName
    """PersistentVolumeClaim in the job's namespace."""
    sub_path: Annotated[str, Field(max_length=1024, pattern=r"^([^/].*)?$")] = ""
    """Directory on the volume; empty means its root."""


class CheckpointSource(ApiModel):
    """A checkpoint of another job."""

    claim_name: DnsName
    """PersistentVolumeClaim that holds it."""
    path: Path
    """Its directory on the volume."""


class Checkpoint(ApiModel):
    """What is saved, where, how often, and what a resume may use."""

    volume: Volume
    """Where checkpoints, logs and metrics go."""
    every_steps: Annotated[int, Field(strict=True, ge=1, le=10_000_000)] = 50
    """Steps between two checkpoints."""
    every_seconds: Seconds | None = None
    """Also save when this much time has passed since the last one."""
    keep_last: Annotated[int, Field(strict=True, ge=1, le=1000)] = 2
    """Checkpoints to keep."""
    load_replay_buffer: Flag = True
    """On resume, train on finished answers of the checkpoint; false answers their prompts again."""
    verify: Literal["Sizes", "Full"] = "Sizes"
    """How a checkpoint is verified before a resume: file sizes and small files, or every byte."""
    on_existing: Literal["Resume", "Refuse"] = "Resume"
    """What a new job of this name (under rljob local: each command) does with checkpoints that are already there."""
    from_: Annotated[CheckpointSource | None, Field(alias="from")] = None
    """Start from this checkpoint of another job."""


class Prompts(ApiModel):
    """How many prompts may be lost, and what happens then."""

    max_skipped: Count = 0
    """Skipped prompts that are acceptable."""
    retry_budget: Annotated[int, Field(strict=True, ge=0, le=1000)] = 3
    """Failed tries of a prompt before it is skipped."""
    on_exceeded: Literal["Warn", "Fail"] = "Warn"
    """Above maxSkipped: warn, or fail the job."""


class FailureRule(ApiModel):
    """One rule; it needs a criterion, and all of its given criteria must match."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Shown in status when the rule decides."""
    action: Literal["Restart", "RestartUncounted", "Fail"]
    """What follows: another attempt that counts toward maxRestarts, one that does not, or none."""
    on_exit_codes: Annotated[list[ExitStatus], Field(max_length=64)] = Field(default_factory=list)
    """Exit codes of the driver."""
    on_reasons: Annotated[list[Annotated[str, Field(max_length=128)]], Field(max_length=64)] = Field(default_factory=list)
    """Failure reasons, such as HeadLost, WorkerLost, OutOfMemory, StallDeadlineExceeded (docs/conditions.md, Succeeded)."""
    on_message_pattern: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Regular expression that some part of the failure's message or last log lines matches. ( ) | * + ? [ ] . \\d \\w \\s ^ $
    only: nothing that could run for ever."""


class FailurePolicy(ApiModel):
    """When a failed attempt is followed by another."""

    max_restarts: Annotated[int, Field(strict=True, ge=0, le=1000)] = 3
    """Restarts after failures before the job fails."""
    backoff_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 5
    """Wait before the first restart; doubles with each."""
    max_backoff_seconds: Annotated[int, Field(strict=True, ge=0, le=86_400)] = 300
    """Longest wait before a restart."""
    reset_after_progress: Flag = True
    """A newer checkpoint sets the count of restarts for maxRestarts and backoff back to zero."""
    rules: Annotated[list[FailureRule], Field(max_length=32)] = Field(default_factory=list)
    """Rules that override the default table; the first match decides."""


class Deadlines(ApiModel):
    """Longest times; past each the job says so by name."""

    active_seconds: Seconds | None = None
    """The whole run, over all attempts, without suspensions."""
    provisioning_seconds: Seconds = 600
    """From an attempt's start to all of its pods being ready."""
    first_step_seconds: Seconds = 600
    """From all pods ready to the first training step."""
    stall_seconds: Seconds = 300
    """Between two training steps."""
    save_seconds: Seconds = 60
    """Writing one checkpoint."""
    handover_seconds: Seconds = 60
    """One hand-over between generation and training."""
    on_stall: Literal["Warn", "Restart", "Fail"] = "Restart"
    """What to do past stallSeconds."""


class RLJobSpec(ApiModel):
    """Async RL post-training of a language model: the whole desired state."""

    trainer: Trainer
    """The pods that train and generate."""
    model: Model
    """The policy."""
    parallelism: Parallelism = Parallelism()
    """Training's parallel layout."""
    generation: Generation
    """How answers are generated, on the same ranks and weights."""
    data: Data
    """The prompts."""
    environment: Environment
    """What scores the answers."""
    algorithm: Algorithm
    """The learning rule and its sizes."""
    validation: Validation | None = None
    """Greedy validation; none when unset."""
    checkpoint: Checkpoint
    """Checkpoints and resume."""
    prompts: Prompts = Prompts()
    """Skipped prompts."""
    failure_policy: FailurePolicy = FailurePolicy()
    """Restarts."""
    deadlines: Deadlines = Deadlines()
    """Longest times."""
    queue_name: Annotated[str, Field(max_length=63)] | None = None
    """Kueue LocalQueue that the job waits in."""
    suspend: Flag = False
    """True stops the job and keeps its checkpoint; false lets it run."""
    ttl_seconds_after_finished: Annotated[int, Field(strict=True, ge=0, le=31_536_000)] | None = None
    """Keep the RayCluster this long after the end, for looking around; unset deletes it at once. The RLJob stays."""
