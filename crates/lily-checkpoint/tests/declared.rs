//! What a `config.json` alone says: the real model's figures, defaults, spellings, declared formats.

mod common;

use common::{Draft, repository};
use lily_checkpoint::{
    DType, DeclaredModel, DeclaredQuantization, LayerKind, ModelConfig, WeightFormat, WeightId,
    WeightRole,
};
use serde_json::json;

const REAL: &str = "fixtures/qwen3.6-35b-a3b/config.json";

#[test]
fn the_real_configuration_is_read_field_by_field() {
    let model = DeclaredModel::read(&repository(REAL)).unwrap();
    let expected = ModelConfig {
        hidden_size: 2048,
        layers: 40,
        full_attention_interval: 4,
        attention_heads: 16,
        key_value_heads: 2,
        head_dim: 256,
        rotary_dim: 64,
        rope_theta: 1e7,
        linear_key_heads: 16,
        linear_value_heads: 32,
        linear_key_dim: 128,
        linear_value_dim: 128,
        conv_kernel: 4,
        experts: 256,
        experts_per_token: 8,
        expert_intermediate: 512,
        shared_intermediate: 512,
        rms_norm_eps: 1e-6,
        vocab_size: 248_320,
        max_positions: 262_144,
        tie_word_embeddings: false,
        eos_token_ids: vec![248_046, 248_044],
    };
    assert_eq!(model.config, expected);
    let directory = repository(REAL).parent().unwrap().to_path_buf();
    assert_eq!(
        DeclaredModel::read(&directory).unwrap(),
        model,
        "by the directory's name"
    );
    let attention = (0..40).filter(|layer| expected.layer_kind(*layer) == LayerKind::Attention);
    assert_eq!(
        attention.collect::<Vec<_>>(),
        [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]
    );
}

#[test]
fn the_real_model_has_its_published_tensors_and_bytes() {
    let model = DeclaredModel::read(&repository(REAL)).unwrap();
    let specs = model.config.weights();
    let bytes: u64 = specs.iter().map(|spec| model.weight_bytes(spec)).sum();
    assert_eq!(bytes, 19_508_787_456);
    let tensors = specs
        .iter()
        .map(|spec| match model.quantization.format_of(spec) {
            WeightFormat::Plain(_) => 1,
            WeightFormat::Affine { .. } => 3,
        });
    assert_eq!(tensors.sum::<usize>(), 1757);
    let eight_bits = specs.iter().filter(|spec| {
        matches!(
            model.quantization.format_of(spec),
            WeightFormat::Affine { bits: 8, .. }
        )
    });
    assert_eq!(eight_bits.count(), 80, "routers and shared gates");
}

#[test]
fn absent_fields_have_the_defaults_of_mlx_lm() {
    let json = r#"{"model_type": "qwen3_5_moe_text", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}"#;
    let config = ModelConfig::parse(json, "config.json").unwrap();
    let expected = ModelConfig {
        hidden_size: 4096,
        layers: 32,
        full_attention_interval: 4,
        attention_heads: 32,
        key_value_heads: 8,
        head_dim: 128,
        rotary_dim: 32,
        rope_theta: 1e5,
        linear_key_heads: 16,
        linear_value_heads: 64,
        linear_key_dim: 192,
        linear_value_dim: 128,
        conv_kernel: 4,
        experts: 4,
        experts_per_token: 2,
        expert_intermediate: 32,
        shared_intermediate: 32,
        rms_norm_eps: 1e-6,
        vocab_size: 151_936,
        max_positions: 131_072,
        tie_word_embeddings: false,
        eos_token_ids: vec![],
    };
    assert_eq!(config, expected);
}

#[test]
fn older_spellings_mean_the_same() {
    let draft = Draft::single();
    let parse = |config: &serde_json::Value| ModelConfig::parse(&config.to_string(), "c").unwrap();
    let usual = parse(&draft.config);
    assert_eq!((usual.rope_theta, usual.rotary_dim), (1e7, 8));

    let mut flat = draft.config["text_config"].clone();
    flat["eos_token_id"] = json!([3, 2]);
    assert_eq!(parse(&flat), usual, "the text model's table alone");

    let mut old = draft.config.clone();
    let text = old["text_config"].as_object_mut().unwrap();
    text.remove("rope_parameters");
    text.insert("rope_theta".into(), json!(1e7));
    text.insert("partial_rotary_factor".into(), json!(0.25));
    text.insert("rope_scaling".into(), json!({"type": "default"}));
    assert_eq!(parse(&old), usual, "rope fields outside a table");

    let mut renamed = draft.config.clone();
    let rope = renamed["text_config"]["rope_parameters"]
        .as_object_mut()
        .unwrap();
    rope.remove("rope_type");
    rope.insert("type".into(), json!("default"));
    assert_eq!(parse(&renamed), usual, "type for rope_type");

    let mut single = draft.config.clone();
    single["eos_token_id"] = json!(3);
    assert_eq!(parse(&single).eos_token_ids, [3]);
    single.as_object_mut().unwrap().remove("eos_token_id");
    single["text_config"]["eos_token_id"] = json!(2);
    assert_eq!(
        parse(&single).eos_token_ids,
        [2],
        "from the text model's table"
    );
}

#[test]
fn the_declared_table_has_a_default_exceptions_and_modules_kept_plain() {
    let draft = Draft::single();
    let config = ModelConfig::parse(&draft.config.to_string(), "c").unwrap();
    let format = |quantization: &serde_json::Value, id: WeightId| {
        let json = json!({"quantization_config": quantization}).to_string();
        let table = DeclaredQuantization::parse(&json, "c").unwrap();
        table.format_of(config.weights().iter().find(|spec| spec.id == id).unwrap())
    };
    let affine = |bits, group| WeightFormat::Affine {
        bits,
        group,
        scales: DType::Bf16,
    };
    let plain = WeightFormat::Plain(DType::Bf16);
    let router = WeightId::in_layer(1, WeightRole::Router);
    let head = WeightId::global(WeightRole::Head);
    let down = WeightId::in_layer(1, WeightRole::SharedDown);
    let table = json!({
        "group_size": 64, "bits": 6,
        "language_model.model.layers.1.mlp.gate": {"bits": 8, "group_size": 32},
        "lm_head": false,
    });
    assert_eq!(
        format(&table, router),
        affine(8, 32),
        "an entry with the prefix"
    );
    assert_eq!(
        format(&table, head),
        plain,
        "an entry without the prefix that says no"
    );
    assert_eq!(
        format(&table, WeightId::in_layer(0, WeightRole::Router)),
        affine(6, 64),
        "default"
    );
    assert_eq!(
        format(&table, down),
        plain,
        "32 columns are no whole group of 64"
    );
    let norm = WeightId::global(WeightRole::FinalNorm);
    assert_eq!(format(&table, norm), plain, "a vector is never quantised");
    assert_eq!(
        format(&json!(null), router),
        plain,
        "no table, no quantisation"
    );
    let table = json!({"group_size": 32, "bits": 3, "model.layers.1.mlp.gate": {}});
    assert_eq!(
        format(&table, router),
        affine(4, 64),
        "an entry's own defaults are MLX's"
    );
    let table = json!({"group_size": 32, "bits": 3, "model.layers.1.mlp.gate": true});
    assert_eq!(
        format(&table, router),
        affine(3, 32),
        "true is the table's default"
    );
}
