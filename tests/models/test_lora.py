"""Low-rank adapters: nothing changes until they are trained, merging keeps the numbers, peft reads the export."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_oracle, save_oracle
from flax import nnx
from peft import PeftModel

from focus_jax.models import Decoder, ValueModel, add_lora, load_hf, merge_lora, save_hf, save_peft
from focus_jax.models.decoding import for_decoding
from focus_jax.models.lora import LoRALinear

TOKENS = np.random.default_rng(0).integers(0, 160, (2, 9))
EVERY = {
    "llama": ("q_proj", "o_proj", "down_proj"),
    "qwen2": ("q_proj", "v_proj"),
    "qwen3": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "qwen3_5": ("in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "down_proj"),
}


@jax.jit
def logits(model, tokens):
    return model.logits(model(tokens))


def train(model, scale=0.1):
    """Adapters away from zero, as after training."""
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)
    leaves, tree = jax.tree.flatten(adapters)
    keys = jax.random.split(jax.random.key(9), len(leaves))
    leaves = [leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves), rest)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("family", FAMILIES)
def test_the_export_loads_with_peft_and_gives_the_merged_models_logits(family, tmp_path):
    oracle = make_oracle(family)
    base = load_hf(save_oracle(oracle, tmp_path / "base"))
    before = logits(base, TOKENS)
    model = add_lora(base, targets=EVERY[family], rank=3, alpha=6.0, key=jax.random.key(1))
    np.testing.assert_allclose(logits(model, TOKENS), before, atol=1e-6)

    model = train(model)
    merged = merge_lora(model)
    expected = logits(model, TOKENS)
    assert np.abs(expected - before).max() > 0.05
    np.testing.assert_allclose(logits(merged, TOKENS), expected, atol=1e-5)
    np.testing.assert_array_equal(logits(base, TOKENS), before)  # the original is untouched

    save_peft(model, tmp_path / "adapter", base_model=str(tmp_path / "base"))
    with torch.no_grad():
        answer = PeftModel.from_pretrained(oracle, tmp_path / "adapter")(torch.tensor(TOKENS)).logits
    np.testing.assert_allclose(answer.numpy(), expected, atol=1e-4)

    save_hf(merged, tmp_path / "merged")
    np.testing.assert_array_equal(logits(load_hf(tmp_path / "merged"), TOKENS), logits(merged, TOKENS))


def test_only_adapters_get_gradients_and_they_are_those_of_the_product():
    model = tiny()
    model = train(add_lora(model, targets=("q_proj",), rank=2, alpha=4.0, key=jax.random.key(1)))
    graph, adapters, rest = nnx.split(model, nnx.LoRAParam, ...)

    def loss(adapters):
        return jnp.sum(jnp.tanh(logits(nnx.merge(graph, adapters, rest), TOKENS)))

    gradient = nnx.to_pure_dict(jax.jit(jax.grad(loss))(adapters))["blocks"]["layers"][0]["self_attn"]["q_proj"]
    assert set(gradient) == {"lora_a", "lora_b"}

    # With respect to W + scale * B A, the chain rule gives the same.
    merged = merge_lora(model)
    graph_m, state = nnx.split(merged)

    def full(state):
        return jnp.sum(jnp.tanh(logits(nnx.merge(graph_m, state), TOKENS)))

    weight = nnx.to_pure_dict(jax.jit(jax.grad(full))(state))["blocks"]["layers"][0]["self_attn"]["q_proj"]["weight"]
    layer = model.blocks.layers[0].self_attn.q_proj
    np.testing.assert_allclose(gradient["lora_b"], 2.0 * jnp.einsum("noi,nri->nor", weight, layer.lora_a[...]), atol=2e-4)
    np.testing.assert_allclose(gradient["lora_a"], 2.0 * jnp.einsum("nor,noi->nri", layer.lora_b[...], weight), atol=2e-4)


def test_adapters_are_split_like_the_weights_they_belong_to():
    from focus_jax.models import make_mesh

    with jax.set_mesh(make_mesh(4, 2)):
        layer = add_lora(tiny(), targets=("q_proj",), rank=2, key=jax.random.key(1)).blocks.layers[0].self_attn.q_proj
    assert isinstance(layer, LoRALinear)
    assert layer.lora_a[...].sharding.spec == jax.sharding.PartitionSpec(None, None, "fsdp")
    assert layer.lora_b[...].sharding.spec == jax.sharding.PartitionSpec(None, "tensor", None)


def test_bad_input(tmp_path):
    model = tiny()
    with pytest.raises(ValueError, match=r"no projection c_attn; it has down_proj, gate_proj, k_proj"):
        add_lora(model, targets=("q_proj", "c_attn"), key=jax.random.key(1))
    with pytest.raises(ValueError, match="`rank`: expected at least 1, got 0"):
        add_lora(model, rank=0, key=jax.random.key(1))
    for alpha in (0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"`alpha`: expected a finite number > 0, got {alpha}"):
            add_lora(model, alpha=alpha, key=jax.random.key(1))
    for targets in ((), "q_proj"):
        with pytest.raises(ValueError, match=r"`targets`: expected names of projections, such as"):
            add_lora(model, targets=targets, key=jax.random.key(1))
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(add_lora(model, key=jax.random.key(1)), key=jax.random.key(1))
    with pytest.raises(ValueError, match="got one laid out for decoding"):
        add_lora(for_decoding(model), key=jax.random.key(1))
    with pytest.raises(ValueError, match="expected a model with adapters"):
        save_peft(model, tmp_path, base_model="base")
    with pytest.raises(TypeError, match="expected a Decoder, got ValueModel"):
        save_peft(ValueModel(add_lora(model, key=jax.random.key(1))), tmp_path, base_model="base")
    assert not list(tmp_path.iterdir())


def test_merging_once_more_changes_nothing():
    merged = merge_lora(train(add_lora(tiny(), rank=2, key=jax.random.key(1))))
    np.testing.assert_array_equal(logits(merge_lora(merged), TOKENS), logits(merged, TOKENS))


def test_adapters_that_were_there_stay_until_new_ones_are_written(tmp_path, monkeypatch):
    model = add_lora(tiny(), rank=2, key=jax.random.key(1))
    save_peft(model, tmp_path, base_model="base")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=r"got others in .*\.layers\.\{0,1\}\.self_attn\.k_proj\.lora_A\.weight"):
        save_peft(train(model, np.nan), tmp_path, base_model="base")

    def fail(tensors, file, **_):
        file.write_bytes(b"half")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", fail)
        with pytest.raises(OSError, match="disk full"):
            save_peft(train(model), tmp_path, base_model="base")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_peft(train(model), tmp_path, base_model="base")
    assert sorted(before) == sorted(path.name for path in tmp_path.iterdir())
    assert (tmp_path / "adapter_model.safetensors").read_bytes() != before["adapter_model.safetensors"]


def test_the_configuration_names_what_vllm_reads(tmp_path):
    save_peft(add_lora(tiny(), rank=2, alpha=4.0, key=jax.random.key(1)), tmp_path, base_model="org/base")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 4.0, "org/base")
    assert config["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]


def tiny():
    from focus_jax.models import ModelConfig

    config = ModelConfig("qwen3", 160, 64, 96, 4, 2, 32, ("full_attention",) * 2, tied=True)
    return Decoder(config, key=jax.random.key(0))
