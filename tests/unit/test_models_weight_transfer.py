"""Weights over a group and over files: the same bytes, or an error within the deadline."""

import multiprocessing
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from trinity_dask.models.protocol import TensorMeta, WeightGroupSpec
from trinity_dask.weights.broadcast import (
    ALIGN_BYTES,
    Member,
    TransferMembers,
    engine_ranks,
    lay_out,
    make_group,
    memory_bytes,
    plan_buckets,
    rank_of_worker,
    recv,
    send,
    tensor_meta,
)
from trinity_dask.weights.checksum import Digest, checksum
from trinity_dask.weights.files import read_safetensors, write_safetensors


def weights(seed: int = 0) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 3), (100,), (64, 64), (1,), (33, 5), (2000,)]
    return [(f"w{i}", torch.randn(shape, generator=generator)) for i, shape in enumerate(shapes)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def group_spec(port: int, generation: int = 1, world_size: int = 2, timeout_s: float = 60.0):
    return WeightGroupSpec("127.0.0.1", port, world_size, 1, generation, "gloo", timeout_s)


def form(spec: WeightGroupSpec):
    """Both ends of a two-member group, formed by two threads."""
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(make_group, spec, rank, rank == 0) for rank in (0, 1)]
        return [end.result() for end in ends]


def transfer(ends, sent, meta, bucket_bytes):
    with ThreadPoolExecutor(2) as pool:
        digest = Digest()
        sending = pool.submit(send, ends[0], sent, meta, bucket_bytes)
        receiving = pool.submit(lambda: list(recv(ends[1], meta, bucket_bytes, digest)))
        return sending.result(), receiving.result(), digest


# buckets ----------------------------------------------------------------------------------
def test_buckets_hold_whole_aligned_tensors_in_order():
    meta = tensor_meta(weights())
    buckets = plan_buckets(meta, 5000)
    assert [slot.meta for bucket in buckets for slot in bucket.slots] == list(meta)
    assert len(buckets) > 2
    for bucket in buckets:
        assert bucket.n_bytes <= 5000 or len(bucket.slots) == 1
        end = 0
        for slot in bucket.slots:
            assert slot.start % ALIGN_BYTES == 0
            assert slot.start >= end
            end = slot.start + slot.n_bytes
        assert end == bucket.n_bytes


def test_a_tensor_larger_than_a_bucket_gets_its_own():
    meta = (
        TensorMeta("s", "float32", (1,)),
        TensorMeta("l", "float32", (999,)),
        TensorMeta("t", "int8", (1,)),
    )
    assert [len(bucket.slots) for bucket in plan_buckets(meta, 100)] == [1, 1, 1]


def test_buckets_share_one_memory_without_touching():
    meta = tensor_meta(weights())
    buckets = plan_buckets(meta, 5000)
    end = 0
    for bucket in buckets:
        assert bucket.start % ALIGN_BYTES == 0
        assert bucket.start >= end
        end = bucket.start + bucket.n_bytes
    assert memory_bytes(meta, 5000) == end
    assert memory_bytes((), 5000) == 0


def test_bucket_size_is_checked():
    with pytest.raises(ValueError, match="bucket_bytes"):
        plan_buckets(tensor_meta(weights()), 0)


# the group --------------------------------------------------------------------------------
@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 20])
def test_what_is_received_is_what_was_sent(bucket_bytes):
    ends = form(group_spec(free_port()))
    sent = weights()
    digest, received, their_digest = transfer(ends, sent, tensor_meta(sent), bucket_bytes)
    assert [name for name, _ in received] == [name for name, _ in sent]
    for (_, got), (_, expected) in zip(received, sent, strict=True):
        assert torch.equal(got, expected)
    assert digest.value == their_digest.value == checksum(sent)
    assert digest.n_bytes == their_digest.n_bytes == sum(4 * t.numel() for _, t in sent)


def test_wire_dtype_is_that_of_the_metadata():
    ends = form(group_spec(free_port()))
    sent = weights()
    meta = tensor_meta(sent, dtype="bfloat16")
    digest, received, their_digest = transfer(ends, sent, meta, 5000)
    assert digest.value == their_digest.value
    for (_, got), (_, expected) in zip(received, sent, strict=True):
        assert torch.equal(got, expected.to(torch.bfloat16))


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 1 << 20])
def test_laid_out_tensors_are_sent_from_and_received_where_they_lie(bucket_bytes, monkeypatch):
    ends = form(group_spec(free_port()))
    named = {name: torch.nn.Parameter(tensor) for name, tensor in weights()}
    before = dict(named)
    meta = tensor_meta(named.items())
    assert lay_out(named, meta, bucket_bytes)
    assert all(torch.equal(named[name], tensor) for name, tensor in weights())
    assert all(named[name] is parameter for name, parameter in before.items())
    sent, broadcast = [], ends[0].broadcast

    def noted(buffer):
        sent.append(buffer.data_ptr())
        return broadcast(buffer)

    monkeypatch.setattr(ends[0], "broadcast", noted)
    memory = torch.zeros(memory_bytes(meta, bucket_bytes), dtype=torch.uint8)
    for _ in range(2):
        with ThreadPoolExecutor(2) as pool:
            digest = Digest()
            sending = pool.submit(send, ends[0], named.items(), meta, bucket_bytes)
            received = list(recv(ends[1], meta, bucket_bytes, digest, memory))
        assert sending.result().value == digest.value == checksum(received)
        assert digest.value == checksum(named.items())
        begin = memory.data_ptr()
        assert all(begin <= t.data_ptr() < begin + len(memory) for _, t in received)
        assert set(sent) <= {tensor.data_ptr() for tensor in named.values()}  # nothing is copied
        with torch.no_grad():
            named["w2"].add_(1.0)  # as a train step does, in place


def test_what_cannot_be_laid_out_is_left_alone():
    named = {name: torch.nn.Parameter(tensor) for name, tensor in weights()}
    places = [tensor.data_ptr() for tensor in named.values()]
    assert not lay_out(named, tensor_meta(named.items(), dtype="bfloat16"), 5000)
    plain = dict(weights())
    assert not lay_out(plain, tensor_meta(plain.items()), 5000)
    assert [tensor.data_ptr() for tensor in named.values()] == places


def test_stale_metadata_is_refused_by_the_sender():
    ends = form(group_spec(free_port()))
    sent = weights()
    meta = tensor_meta(sent)
    for wrong in (sent[:-1], sent[1:], [(name, t[None]) for name, t in sent]):
        with pytest.raises(ValueError, match="metadata is stale"):
            send(ends[0], wrong, meta, 1 << 20)


def test_two_groups_and_generations_on_one_store_do_not_meet():
    port = free_port()
    first = form(group_spec(port, generation=1))
    first[0].close()
    first[1].close()
    second = form(group_spec(free_port(), generation=2))
    sent = weights(seed=3)
    _, received, _ = transfer(second, sent, tensor_meta(sent), 4096)
    assert torch.equal(received[2][1], sent[2][1])


def test_a_missing_member_is_an_error_at_the_deadline():
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"generation 7: rank 0 of 2 could not join"):
        make_group(group_spec(free_port(), generation=7, timeout_s=1.0), 0, True)
    assert time.monotonic() - start < 30


def test_closing_one_end_ends_a_waiting_receiver():
    ends = form(group_spec(free_port()))
    meta = tensor_meta(weights())
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            list(recv(ends[1], meta, 1 << 20))
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    ends[0].close()
    waiting.join(timeout=30)
    assert not waiting.is_alive()
    assert len(errors) == 1


# ranks ------------------------------------------------------------------------------------
def engine(ranks: int, replicas: int = 1) -> list[SimpleNamespace]:
    """vLLM's parallel configuration in each worker of an engine."""
    return [
        SimpleNamespace(world_size=ranks, rank=rank, data_parallel_index=replica)
        for replica in range(replicas)
        for rank in range(ranks)
    ]


def test_workers_of_all_engines_have_the_ranks_after_the_trainer():
    group = TransferMembers("nccl", 60.0)
    engines = {"a": engine(2), "b": engine(1), "c": engine(2, replicas=2)}
    members = tuple(Member(slot, "1", len(workers)) for slot, workers in engines.items())
    specs = group.next_generation("rank0", members, "host", 1)
    assert {spec.world_size for spec in specs.values()} == {8}
    ranks = [rank_of_worker(specs[s], worker) for s, all_ in engines.items() for worker in all_]
    assert ranks == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="would be rank 8"):
        rank_of_worker(specs["c"], SimpleNamespace(world_size=2, rank=0, data_parallel_index=2))


def test_an_engine_takes_as_many_ranks_as_it_has_workers():
    assert engine_ranks({}) == 1
    assert engine_ranks({"tensor_parallel_size": 4, "extra_engine_args": None}) == 4
    extra = {"pipeline_parallel_size": 2, "data_parallel_size": 3}
    assert engine_ranks({"tensor_parallel_size": 2, "extra_engine_args": extra}) == 12


def test_every_worker_of_a_parallel_engine_receives_the_same_bytes():
    """One trainer, an engine of two workers and one of one, over gloo."""
    port, sent = free_port(), weights()
    group = TransferMembers("gloo", 60.0, floor_bytes=4096)
    members = (Member("a", "1", 2), Member("b", "1", 1))
    specs = group.next_generation("rank0", members, "127.0.0.1", port)
    workers = [("a", worker) for worker in engine(2)] + [("b", worker) for worker in engine(1)]

    def receive(slot: str, worker: SimpleNamespace) -> int:
        end = make_group(specs[slot], rank_of_worker(specs[slot], worker), False)
        digest = Digest()
        list(recv(end, tensor_meta(sent), 5000, digest))
        return digest.value

    with ThreadPoolExecutor(3) as pool:
        receiving = [pool.submit(receive, *worker) for worker in workers]
        master = make_group(specs["trainer"], 0, True)
        digest = send(master, sent, tensor_meta(sent), 5000)
        assert {end.result() for end in receiving} == {digest.value}
    assert master.bytes_per_s is not None
    assert master.bytes_per_s > 0


def _join_and_die(port: int) -> None:
    make_group(group_spec(port), 0, True)
    os._exit(1)


def test_a_dead_sender_ends_the_receiver_before_the_deadline():
    port = free_port()
    sender = multiprocessing.get_context("spawn").Process(target=_join_and_die, args=(port,))
    sender.start()
    end = make_group(group_spec(port, timeout_s=120.0), 1, False)
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        list(recv(end, tensor_meta(weights()), 1 << 20))
    assert time.monotonic() - start < 60
    sender.join(timeout=30)


# files ------------------------------------------------------------------------------------
def test_file_round_trip(tmp_path):
    path = str(tmp_path / "deep" / "w.safetensors")
    written = write_safetensors(path, weights(), durable=True)
    digest = Digest()
    read = dict(read_safetensors(path, digest))
    for name, tensor in weights():
        assert torch.equal(read[name], tensor)
    assert digest.value == written.value == checksum(weights())
    assert digest.n_bytes == written.n_bytes
    assert os.listdir(tmp_path / "deep") == ["w.safetensors"]


def test_fault_17_an_overwritten_path_is_read_anew(tmp_path):
    path = str(tmp_path / "w.safetensors")
    for seed in (1, 2, 3):
        write_safetensors(path, weights(seed))
        read = dict(read_safetensors(path))
        assert all(torch.equal(read[name], tensor) for name, tensor in weights(seed))


def test_overwriting_leaves_an_open_reader_its_file(tmp_path):
    path = str(tmp_path / "w.safetensors")
    write_safetensors(path, weights(1))
    held = dict(read_safetensors(path))
    write_safetensors(path, weights(2))
    assert all(torch.equal(held[name], tensor) for name, tensor in weights(1))


def test_directory_of_files_and_missing_path(tmp_path):
    write_safetensors(str(tmp_path / "a.safetensors"), weights()[:2])
    write_safetensors(str(tmp_path / "b.safetensors"), weights()[2:])
    assert [n for n, _ in read_safetensors(str(tmp_path))] == [n for n, _ in weights()]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        list(read_safetensors(str(tmp_path / "nowhere")))


def test_a_failed_write_changes_nothing(tmp_path):
    path = str(tmp_path / "w.safetensors")
    write_safetensors(path, weights(1))

    def broken():
        yield weights(2)[0]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_safetensors(path, broken())
    assert os.listdir(tmp_path) == ["w.safetensors"]
    assert torch.equal(dict(read_safetensors(path))["w0"], weights(1)[0][1])
