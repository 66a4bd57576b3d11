"""config.json against transformers' own classes: defaults, old and new spellings, what is refused."""

import json
from dataclasses import replace

import pytest
from checkpoints import BASE, CONFIGS, DELTA, FAMILIES
from transformers.models.qwen3_5 import Qwen3_5Config

from focus_jax.models import ConfigError, DeltaConfig, ModelConfig

# What every published config.json says; all else may be left to the class.
OPTIONAL = ("num_key_value_heads", "max_position_embeddings")
SIZES = {name: size for name, size in BASE.items() if name not in OPTIONAL}
SIZES |= {"num_attention_heads": 32, "hidden_size": 128}


def fields_of(family, **changes):
    return {"model_type": "qwen3_5_text" if family == "qwen3_5" else family, **BASE, **changes}


def theirs(family, fields):
    """Every field as transformers' class completes it."""
    return CONFIGS[family][0](**{name: value for name, value in fields.items() if name != "model_type"}).to_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_fields_left_out_are_what_the_class_of_transformers_fills_in(family):
    fields = fields_of(family, **SIZES)
    for name in OPTIONAL:
        del fields[name]
    config = ModelConfig.from_hf(fields)
    full = theirs(family, fields)
    assert config == ModelConfig.from_hf(full)
    assert config.max_positions == full["max_position_embeddings"]
    assert config.num_kv_heads == full["num_key_value_heads"]
    assert config.head_dim == full.get("head_dim", 4)
    assert (config.rope_theta, config.norm_eps, config.tied) == (1e4, 1e-6, False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_written_reads_the_same_by_us_and_by_transformers_new_and_old(family, tied):
    more = {"head_dim": 24, "attention_bias": True} if family != "qwen2" else {}
    config = ModelConfig.from_hf(fields_of(family, **more, tie_word_embeddings=tied, rope_theta=5e5, rms_norm_eps=1e-5))
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert ModelConfig.from_hf(theirs(family, written)) == config
    old = {name: value for name, value in written.items() if name not in ("rope_parameters", "layer_types")}
    assert ModelConfig.from_hf(old) == config
    new = {name: value for name, value in written.items() if name not in ("rope_theta", "partial_rotary_factor")}
    assert ModelConfig.from_hf(new) == config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_spellings_of_the_rotary_base_agree(family):
    spellings = (
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 3.0, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
    )
    for spelling in spellings:
        assert ModelConfig.from_hf(fields_of(family, **spelling)).rope_theta == 1e6
        assert theirs(family, fields_of(family, **spelling))["rope_parameters"]["rope_theta"] == 1e6


def test_b53_the_rotated_share_is_read_wherever_it_stands():
    places = ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}})
    for place in places:
        assert ModelConfig.from_hf(fields_of("qwen3_5", **place)).rotary_dim == 128
        assert ModelConfig.from_hf({"model_type": "qwen3_5", "text_config": fields_of("qwen3_5", **place)}).rotary_dim == 128
    released = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 1e7}
    config = ModelConfig.from_hf(fields_of("qwen3_5", rope_parameters={"rope_type": "default", **released}))
    assert (config.rotary_dim, config.rope_theta) == (64, 1e7)


def test_b56_the_head_is_not_the_width_over_the_heads():
    config = ModelConfig.from_hf(fields_of("qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8))
    assert (config.head_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim) == (128, 4096, 1024)
    assert ModelConfig.from_hf(fields_of("llama", head_dim=None)).head_dim == 16
    assert ModelConfig.from_hf(fields_of("qwen2", head_dim=24)).head_dim == 24


def test_old_and_new_ways_to_say_where_full_attention_stands():
    old = ModelConfig.from_hf(fields_of("qwen3_5", num_hidden_layers=6, full_attention_interval=3))
    assert old.layer_types == ("linear_attention", "linear_attention", "full_attention") * 2
    assert (old.num_blocks, len(old.block)) == (2, 3)
    assert ModelConfig.from_hf(fields_of("qwen3_5", num_hidden_layers=6, layer_types=list(old.layer_types))) == old


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [(1, None, True), (None, 1, True), (None, None, False), (1, 0, True), (0, 1, False), (0, None, False)],
)
def test_b55_the_tie_flag_of_a_nested_config_is_the_outer_one_where_there_is_one(outer, inner, tied):
    def flag(value):
        return {} if value is None else {"tie_word_embeddings": bool(value)}

    fields = {"model_type": "qwen3_5", **flag(outer), "text_config": fields_of("qwen3_5", **flag(inner))}
    assert ModelConfig.from_hf(fields).tied is tied


def test_the_config_of_the_vision_and_text_class_reads_as_its_text_part():
    text = fields_of("qwen3_5", **DELTA)
    full = Qwen3_5Config(text_config={k: v for k, v in text.items() if k != "model_type"}).to_dict()
    assert ModelConfig.from_hf(full) == ModelConfig.from_hf(text)


def test_a_sliding_window_that_no_layer_uses_is_no_obstacle():
    for changes in ({"use_sliding_window": False, "sliding_window": 64}, {"use_sliding_window": True, "max_window_layers": 3}):
        fields = fields_of("qwen2", **changes)
        assert set(theirs("qwen2", fields)["layer_types"]) == {"full_attention"}
        assert ModelConfig.from_hf(fields).layer_types == ("full_attention",) * 3


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"model_type": "mixtral"}, "'mixtral' is not supported; supported: llama"),
        ("llama", {"model_type": None}, "None is not supported"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}}, "rope type 'linear'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "the same for all layers"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved"),
        ("llama", {"partial_rotary_factor": 0.5}, "`partial_rotary_factor` 0.5 with `model_type` 'llama'"),
        ("qwen3_5", {"partial_rotary_factor": 0.005}, "no even number"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sliding-window"),
        ("qwen3", {"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "sliding-window"),
        ("qwen3", {"num_experts": 8}, "mixture of experts"),
        ("llama", {"hidden_act": "gelu"}, "`hidden_act` 'gelu'"),
        ("llama", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "dequantised first"),
        ("qwen3", {"layer_types": ["full_attention"]}, "expected 3 of full_attention"),
        ("qwen3", {"layer_types": 3}, "expected 3 of full_attention, got 3"),
        ("qwen3", {"layer_types": [{}, {}, {}]}, "expected 3 of full_attention"),
        ("qwen2", {"layer_types": None, "use_sliding_window": True, "max_window_layers": "1"}, "`max_window_layers`: expected"),
        ("qwen3", {"layer_types": ["linear_attention"] * 3}, "expected 3 of full_attention"),
        ("qwen3", {"hidden_size": None}, "`hidden_size`: expected a positive whole number, got None"),
        ("qwen3", {"vocab_size": "many"}, "`vocab_size`: expected a positive whole number, got 'many'"),
        ("qwen3", {"rope_theta": "1e6"}, "`rope_theta`: expected a finite number >= 0, got '1e6'"),
        ("qwen3", {"rope_parameters": {"rope_theta": float("nan")}}, "`rope_theta`: expected a finite number >= 0, got nan"),
        ("llama", {"rope_theta": 0}, "`rope_theta`: expected a finite number > 0, got 0"),
        ("llama", {"rms_norm_eps": float("inf")}, "`rms_norm_eps`: expected a finite number >= 0, got inf"),
        ("llama", {"tie_word_embeddings": "false"}, "`tie_word_embeddings`: expected true or false, got 'false'"),
        ("qwen3", {"num_key_value_heads": 3}, "multiple of `num_kv_heads`, got 4, 3"),
        ("llama", {"hidden_size": 66}, "expected `head_dim`, or `hidden_size` a multiple"),
        ("qwen3_5", {"linear_num_key_heads": 3, "linear_num_value_heads": 4, "num_hidden_layers": 4}, "got 4, 3"),
    ],
)
def test_what_is_not_implemented_or_wrong_is_refused_by_name(family, changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf({**fields_of(family), **changes})


def test_every_obstacle_is_named_at_once_also_in_a_nested_config():
    text = fields_of("qwen3_5", hidden_act="gelu", num_experts=4)
    with pytest.raises(ConfigError, match=r"mixture of experts; `hidden_act` 'gelu'.*; quantised"):
        ModelConfig.from_hf({"model_type": "qwen3_5", "quantization_config": {"bits": 4}, "text_config": text})


def test_a_shape_that_is_none_is_refused_also_without_a_file():
    config = ModelConfig("qwen3", 512, 64, 128, 4, 2, 32, ("full_attention",) * 2)
    for changes, message in [
        ({"vocab_size": 0}, "`vocab_size`: expected at least 1, got 0"),
        ({"layer_types": ()}, "`num_layers`: expected at least 1, got 0"),
        ({"num_heads": 3}, "multiple of `num_kv_heads`, got 3, 2"),
        ({"head_dim": 31}, "a head of 31 leaves no even number"),
        ({"layer_types": ("linear_attention", "full_attention")}, "expected `delta` for linear attention layers"),
        ({"delta": DeltaConfig(1, 2, 8, 8, 4)}, "expected `delta` for linear attention layers, and only for those"),
    ]:
        with pytest.raises(ConfigError, match=message):
            replace(config, **changes)


def test_a_folder_without_a_readable_config_says_so(tmp_path):
    with pytest.raises(ConfigError, match=r"expected a config.json in .*; give the folder"):
        ModelConfig.load(tmp_path)
    for content, message in (("{", "cannot be read as JSON"), ("[]", "expected an object"), ('{"model_type": "bert"}', "'bert'")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=rf"config\.json: .*{message}"):
            ModelConfig.load(tmp_path)
