"""Plausible faults: in the model, the parallelism, training, its data and checkpoints, and the tools."""

from tests.soak.faults.fault import Fault

BROKEN = (
    # The model
    Fault(
        "rope-scales-fast-channels",
        "Llama 3's RoPE scaling stretches the fast channels and leaves the slow ones",
        "(keep + (1.0 - keep) / scaling.factor)",
        "(keep / scaling.factor + (1.0 - keep))",
    ),
    Fault(
        "gate-and-up-swapped",
        "gate and up projections swap names on the way from and to Hugging Face",
        '"layers.{}.feed_forward.w1": "model.layers.{}.mlp.gate_proj",\n'
        '    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",\n'
        '    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.up_proj",',
        '"layers.{}.feed_forward.w1": "model.layers.{}.mlp.up_proj",\n'
        '    "layers.{}.feed_forward.w2": "model.layers.{}.mlp.down_proj",\n'
        '    "layers.{}.feed_forward.w3": "model.layers.{}.mlp.gate_proj",',
    ),
    Fault(
        "tied-weight-counted-twice",
        "a tied embedding counts twice among the parameters",
        "return sum(parameter.numel() for parameter in self.module.parameters())",
        "return sum(p.numel() for _, p in self.module.named_parameters(remove_duplicate=False))",
    ),
    Fault(
        "chunk-gradient-overwritten",
        "the head's gradient is that of the last chunk alone",
        "beta=min(first, 1)",
        "beta=0",
    ),
    Fault(
        "largest-logit-of-one-rank",
        "the split loss does not reduce the largest logit over the ranks",
        'largest = _all_reduce(own_largest, "max", group_name)',
        "largest = own_largest",
    ),
    Fault(
        "attention-sees-ahead",
        "the backward of attention on a CPU lets a token see the next one",
        "torch.full((BLOCK, BLOCK), -torch.inf).triu_(1)",
        "torch.full((BLOCK, BLOCK), -torch.inf).triu_(2)",
    ),
    # The parallelisation
    Fault(
        "no-sum-over-replicas",
        "HSDP never all-reduces gradients over its replicas",
        "module.set_requires_all_reduce(last, recurse=False)",
        "module.set_requires_all_reduce(False, recurse=False)",
    ),
    Fault(
        "kept-over-the-step",
        "parameters that stay gathered are not freed after the last micro batch: the next step uses old ones",
        "module.set_reshard_after_backward(last or unit.reshard_after_backward, recurse=False)",
        "module.set_reshard_after_backward(unit.reshard_after_backward, recurse=False)",
    ),
    Fault(
        "local-norm",
        "gradients are clipped by the norm of the local shards",
        "dist.all_reduce(square)",
        "pass",
    ),
    Fault(
        "norm-gradient-of-one-rank",
        "the gradient of a norm is not summed over tp with sequence parallelism",
        "parameter.to_local(grad_placements=[Partial()]) if partial else parameter.to_local()",
        "parameter.to_local()",
    ),
    Fault(
        "scatter-not-awaited",
        "the reduce-scatter of tensor parallelism is not awaited",
        '_wait(_c10d.reduce_scatter_tensor(stacked, "sum", axis.degree, axis.group_name))',
        '_c10d.reduce_scatter_tensor(stacked, "sum", axis.degree, axis.group_name)',
    ),
    Fault(
        "replicas-read-alike",
        "the replicas of HSDP all read the same part of the batch",
        'mesh.get_local_rank("dp_replicate") * plan.dp_shard + mesh.get_local_rank("dp_shard")',
        'mesh.get_local_rank("dp_shard")',
    ),
    Fault(
        "last-prefetched-first",
        "a unit prefetches the units that are needed last",
        '(other for other in order[i + 1 :] if phase == "forward" or regathered(other))',
        '(other for other in reversed(order[i + 1 :]) if phase == "forward" or regathered(other))',
    ),
    # The planner
    Fault(
        "memory-without-tp",
        "the planner takes a tensor-parallel rank's share for the whole weight",
        "full.chunk(axis.degree, placement.dim)[0].clone() if isinstance(placement, Shard) else full",
        "full",
    ),
    Fault(
        "best-plan-dropped",
        "the search leaves out the fastest plans",
        "self.open.reverse()",
        "self.open = sorted(self.open, key=lambda c: -c.rate())[8:] or self.open",
    ),
    # A step
    Fault(
        "loss-not-divided",
        "the gradient is that of the sum over tokens, not of their mean",
        "micro_loss = loss_of(sharded.model, batch, global_tokens)",
        "micro_loss = loss_of(sharded.model, batch, None)",
    ),
    Fault(
        "not-finite-is-applied",
        "a step that is not finite is counted as skipped, and its update applied",
        "optimizer.grad_scale, optimizer.found_inf = divisor, skipped",
        "optimizer.grad_scale, optimizer.found_inf = divisor, None",
    ),
    Fault(
        "warmup-one-late",
        "the warm-up begins with a step of learning rate 0",
        "config.lr * step / config.warmup_steps",
        "config.lr * (step - 1) / config.warmup_steps",
    ),
    Fault(
        "rounding-by-place-in-shard",
        "stochastic rounding depends on where a rank's shard begins",
        "shard.first + index + index // shard.columns * shard.gap",
        "index",
    ),
    # Data
    Fault(
        "order-off-by-one",
        "each step begins one sequence too early in the order",
        "self._next_sample += self._shape.global_batch_size",
        "self._next_sample += self._shape.global_batch_size - 1",
    ),
    Fault(
        "epochs-alike",
        "every epoch has the order of the first",
        "np.random.SeedSequence([seed, int(epoch)])",
        "np.random.SeedSequence([seed, 0])",
    ),
    Fault(
        "documents-off-by-one",
        "a document sees the last token of the one before it",
        "first[starts] = starts",
        "first[starts] = starts - 1",
    ),
    Fault(
        "resume-reads-from-the-start",
        "a resumed run reads its data from the beginning",
        "TrainLoader(self.order, self.sequences, self.batch, position, ",
        "TrainLoader(self.order, self.sequences, self.batch, TrainPosition(), ",
    ),
    Fault(
        "stream-forgets-the-token",
        "a streamed run resumes at the begin of the document that it was in",
        "self.place = Place(epoch, window, document, token + len(part))",
        "self.place = Place(epoch, window, document, len(part))",
    ),
    Fault(
        "stream-dealt-without-the-epoch",
        "every epoch of a stream has the order of the first",
        "np.random.SeedSequence([seed, epoch, 2])",
        "np.random.SeedSequence([seed, 0, 2])",
    ),
    Fault(
        "stream-of-a-changed-file",
        "a file of a stream that has changed is trained on",
        "remote.check(shard.name, location, shard.size_bytes, shard.version)\n    with",
        "with",
    ),
    Fault(
        "shards-of-another-job",
        "finished shards are kept though text or settings have changed",
        "return result if intact and result.key == piece_key(job, piece) else None",
        "return result if intact else None",
    ),
    # Checkpoints, and the folder of a run
    Fault(
        "named-before-complete",
        "a checkpoint has its name before its manifest",
        "write_synced(partial / MANIFEST, manifest_to_text(manifest))\n"
        "        flush_folder(partial)\n"
        "        os.rename(partial, final)",
        "os.rename(partial, final)\n"
        "        write_synced(final / MANIFEST, manifest_to_text(manifest))\n"
        "        flush_folder(final)",
    ),
    Fault(
        "shards-not-synced",
        "a checkpoint is committed before its shards are on disk",
        "os.fsync(file.fileno())\n    for future in hashed:",
        "pass\n    for future in hashed:",
    ),
    Fault(
        "hash-not-compared",
        "a file of the right size passes with any contents",
        'if mode == "full" and hash_file(path).sha256 != saved.sha256:',
        "if False:",
    ),
    Fault(
        "oldest-kept",
        "retention keeps the oldest checkpoints and deletes the newest",
        "newest = steps[-keep:] if keep else steps",
        "newest = steps[:keep] if keep else steps",
    ),
    Fault(
        "lock-not-taken",
        "the note of a run's lock is written, but the lock is not taken",
        "lock.acquire(timeout=wait_s)",
        "pass",
    ),
    # Tools that write files
    Fault(
        "export-file-too-large",
        "files of an export are larger than requested",
        "sum(t.size_bytes for t in files[-1].values()) + tensor.size_bytes > limit_bytes",
        "sum(t.size_bytes for t in files[-1].values()) > limit_bytes",
    ),
    Fault(
        "float16-overflows",
        "an export to float16 writes infinities",
        "if dtype == torch.float16 and bool(",
        "if False and bool(",
    ),
)
