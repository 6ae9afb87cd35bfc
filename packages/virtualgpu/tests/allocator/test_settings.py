"""The settings in PYTORCH_CUDA_ALLOC_CONF that are obeyed, and those that are refused."""

import pytest

from virtualgpu.allocator import Settings

from .scripted import MiB, allocator


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size:20", "Unrecognized key 'max_split_size'.*max_split_size_mb"),
        ("max_split_size_mb:10", "max_split_size_mb must be at least 20"),
        ("max_split_size_mb:many", "max_split_size_mb must be a whole number"),
        ("large_segment_size_mb:10", "must be more than 10"),
        ("large_segment_size_mb:40,max_split_size_mb:30", "max_split_size_mb must be at least 40"),
        ("roundup_power2_divisions:3", "must be a power of two"),
        ("roundup_power2_divisions:[1:2", "closing bracket"),
        ("roundup_power2_divisions:[2]", "start:number"),
        ("expandable_segments:true", "True or False"),
        ("per_process_memory_fraction:1.5", "between 0 and 1"),
        ("expandable_segments", "key:value"),
        ("backend:other", "native"),
        ("garbage_collection_threshold:1.2", "between 0 and 1"),
        ("release_lock_on_cudamalloc:none", "True or False"),
        ("pinned_num_register_threads:1024", "at most 128"),
    ],
)
def test_bad_settings_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        Settings.parse(text)


@pytest.mark.parametrize("text", ["backend:cudaMallocAsync", "throw_on_cudamalloc_oom:True"])
def test_settings_that_are_not_served_say_so(text):
    with pytest.raises(NotImplementedError, match="not support"):
        Settings.parse(text)


@pytest.mark.parametrize("value", ["1", "0", ""])
def test_an_allocator_without_a_cache_is_not_served(value):
    """Check any value of the variable, because PyTorch checks only whether it is set."""
    with pytest.raises(NotImplementedError, match="^PYTORCH_NO_CUDA_MEMORY_CACHING is set"):
        Settings.from_environment({"PYTORCH_NO_CUDA_MEMORY_CACHING": value})


def test_settings_from_the_environment():
    assert Settings.from_environment({}) == Settings()
    both = {
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:30",
        "PYTORCH_CUDA_ALLOC_CONF": " backend:native, max_split_size_mb : 40 ",
    }
    assert Settings.from_environment(both).max_split_size == 40 * MiB
    memory = allocator(100 * MiB, "per_process_memory_fraction:0.5")
    assert memory.allowed == 50 * MiB
