//! Every kind of damage that we thought of, made by altering a good checkpoint in one place: each must be
//! refused as what it is, in words that name the file and the tensor.

mod common;

use common::{Draft, Files, edit_header, open};
use lily_checkpoint::CheckpointError as Error;
use serde_json::{Value, json};

const FILE: &str = "model.safetensors";
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";
const NORM: &str = "language_model.model.norm.weight";
const EMBEDDING: &str = "language_model.model.embed_tokens.weight";
const ROUTER: &str = "language_model.model.layers.0.mlp.gate";
const QUERY: &str = "language_model.model.layers.1.self_attn.q_proj";
const EXPERTS: &str = "language_model.model.layers.1.mlp.switch_mlp.down_proj";
const CONV: &str = "language_model.model.layers.0.linear_attn.conv1d.weight";

/// How a checkpoint is spoiled.
enum Damage {
    /// Before a single-file checkpoint is written.
    Draft(fn(&mut Draft)),
    /// Before a sharded checkpoint is written.
    Sharded(fn(&mut Draft)),
    /// The bytes of a single-file checkpoint.
    Bytes(fn(&mut Files)),
    /// The header's text of a single-file checkpoint.
    Header(fn(String) -> String),
    /// One field of the configuration's text table.
    Text(&'static str, Value),
    /// One field of the configuration.
    Config(&'static str, Value),
}

struct Defect {
    name: &'static str,
    damage: Damage,
    /// Whether the error is of the right kind.
    kind: fn(&Error) -> bool,
    /// What the message must contain, the file first.
    mentions: Vec<&'static str>,
}

macro_rules! defects {
    ($($name:literal: $damage:expr => $variant:ident [$($mention:expr),+];)*) => {
        vec![$(Defect {
            name: $name,
            damage: $damage,
            kind: |error| matches!(error, Error::$variant { .. }),
            mentions: vec![$($mention),+],
        }),*]
    };
}

fn weights(files: &mut Files) -> &mut Vec<u8> {
    files.get_mut(FILE).unwrap()
}

/// The entry of the final norm as the header has it.
fn norm_entry(header: &str) -> String {
    let start = header.find(&format!("\"{NORM}\"")).unwrap();
    let end = start + header[start..].find('}').unwrap() + 1;
    header[start..end].to_string()
}

/// Changes the entry of the final norm.
fn edit_norm(header: String, edit: impl FnOnce(Value) -> Value) -> String {
    let entry = norm_entry(&header);
    let parsed: Value = serde_json::from_str(&format!("{{{entry}}}")).unwrap();
    let edited = edit(parsed[NORM].clone());
    header.replace(&entry, &format!("\"{NORM}\":{edited}"))
}

/// Moves the norm's offsets.
fn move_norm(header: String, start: i64, end: i64) -> String {
    edit_norm(header, |mut entry| {
        let at = |index: usize, entry: &Value| entry["data_offsets"][index].as_i64().unwrap();
        let moved = [at(0, &entry) + start, at(1, &entry) + end];
        entry["data_offsets"] = json!(moved);
        entry
    })
}

fn header_defects() -> Vec<Defect> {
    use Damage::{Bytes, Header};
    defects! {
        "empty file": Bytes(|files| weights(files).clear()) => Header [FILE, "8 bytes"];
        "seven bytes": Bytes(|files| weights(files).truncate(7)) => Header [FILE, "7 bytes"];
        "length field alone": Bytes(|files| weights(files).truncate(8)) => Header [FILE, "incomplete"];
        "cut in the header": Bytes(|files| weights(files).truncate(300))
            => Header [FILE, "300 bytes", "incomplete"];
        "cut in the data": Bytes(|files| { let half = weights(files).len() / 2; weights(files).truncate(half); })
            => HeaderTensor [FILE, "incomplete"];
        "last byte lost": Bytes(|files| { weights(files).pop(); })
            => HeaderTensor [FILE, "something_new", "incomplete"];
        "bytes behind the last tensor": Bytes(|files| weights(files).push(0))
            => Header [FILE, "where the last tensor ends"];
        "header length zero": Bytes(|files| weights(files)[..8].fill(0)) => Header [FILE, "empty header"];
        "header length beyond the cap": Bytes(|files| weights(files)[..8].fill(0xff))
            => Header [FILE, "100000000", "18446744073709551615"];
        "header length beyond the file": Bytes(|files| weights(files)[2] = 9) => Header [FILE, "incomplete"];
        "not a table": Header(|_| "[]".into()) => Header [FILE, "starts with {"];
        "white space first": Header(|header| format!(" {header}")) => Header [FILE, "0x20"];
        "not JSON": Header(|header| header.replacen(':', ";", 1)) => Header [FILE, "JSON"];
        "cut JSON": Header(|header| header[..header.len() - 5].to_string()) => Header [FILE, "JSON"];
        "two JSON values": Header(|header| header + "{}") => Header [FILE, "trailing"];
        "not UTF-8": Bytes(|files| weights(files)[10] = 0xff) => Header [FILE, "JSON"];
        "deep nesting": Header(|_| format!("{{\"a\":{}", "[".repeat(100_000))) => Header [FILE, "JSON"];
        "metadata not of text": Header(|header| header.replace("\"mlx\"", "7")) => Header [FILE, "string"];
        "no offsets": Header(|header| edit_norm(header, |mut entry| {
            entry.as_object_mut().unwrap().remove("data_offsets");
            entry
        })) => Header [FILE, "data_offsets"];
        "negative dimension": Header(|header| edit_norm(header, |mut entry| { entry["shape"] = json!([-64]); entry }))
            => Header [FILE, "-64"];
        "fractional dimension": Header(|header| edit_norm(header, |mut entry| { entry["shape"] = json!([64.5]); entry }))
            => Header [FILE, "64.5"];
        "unknown dtype": Header(|header| edit_norm(header, |mut entry| { entry["dtype"] = json!("BF17"); entry }))
            => HeaderTensor [FILE, NORM, "BF17"];
        "shape overflows": Header(|header| edit_norm(header, |mut entry| {
            entry["shape"] = json!([1u64 << 32, 1u64 << 32]);
            entry
        })) => HeaderTensor [FILE, NORM, "2^64"];
        "shape times element size overflows": Header(|header| edit_norm(header, |mut entry| {
            entry["shape"] = json!([1u64 << 61]);
            entry
        })) => HeaderTensor [FILE, NORM, "2^64"];
        "too many dimensions": Header(|header| edit_norm(header, |mut entry| {
            entry["shape"] = json!(vec![1; 17]);
            entry
        })) => HeaderTensor [FILE, NORM, "17"];
        "shape larger than the bytes": Header(|header| edit_norm(header, |mut entry| { entry["shape"] = json!([65]); entry }))
            => HeaderTensor [FILE, NORM, "130 bytes", "128 bytes"];
        "offsets reversed": Header(|header| move_norm(header, 0, -200)) => HeaderTensor [FILE, NORM, "in order"];
        "offsets behind the data": Header(|header| move_norm(header, 1 << 40, 1 << 40))
            => HeaderTensor [FILE, NORM, "within"];
        "overlap": Header(|header| move_norm(header, -2, -2)) => HeaderTensor [FILE, NORM, "overlap"];
        "gap": Header(|header| move_norm(header, 2, 2)) => HeaderTensor [FILE, NORM, "gap"];
        "a name that speaks to the terminal": Header(|header| header.replacen("model.something_new", "\\u001b[2J", 1))
            => HeaderTensor [FILE, "language_model.\\u{1b}[2J", "printable"];
        "a name of a megabyte": Header(|header| header.replacen("something_new", &"n".repeat(1 << 20), 1))
            => HeaderTensor [FILE, "language_model.model.nnnn", "1048597 bytes"];
        "the same name twice": Header(|header| {
            let entry = norm_entry(&header);
            header.replace(&entry, &format!("{entry},{entry}"))
        }) => DuplicateTensor [FILE, NORM];
    }
}

fn tensor_defects() -> Vec<Defect> {
    use Damage::Draft;
    defects! {
        "missing norm": Draft(|draft| draft.remove(NORM)) => MissingTensor [FILE, NORM, "[64]"];
        "missing codes": Draft(|draft| draft.remove(EMBEDDING)) => MissingTensor [FILE, EMBEDDING];
        "missing scales": Draft(|draft| draft.remove(&format!("{QUERY}.scales")))
            => MissingTensor [FILE, QUERY, "q_proj.scales"];
        "missing biases": Draft(|draft| draft.remove(&format!("{QUERY}.biases")))
            => MissingTensor [FILE, "q_proj.biases"];
        "missing scales and biases": Draft(|draft| {
            draft.remove(&format!("{QUERY}.scales"));
            draft.remove(&format!("{QUERY}.biases"));
        }) => MissingTensor [FILE, "q_proj.scales"];
        "wrong vector length": Draft(|draft| draft.reshape(NORM, "BF16", &[63], 2))
            => WrongShape [FILE, NORM, "[64]", "[63]"];
        "wrong rank": Draft(|draft| draft.reshape(NORM, "BF16", &[64, 1], 2)) => WrongShape [FILE, NORM, "[64, 1]"];
        "wrong rows": Draft(|draft| draft.reshape(EMBEDDING, "U32", &[95, 8], 4))
            => WrongShape [FILE, EMBEDDING, "[96, words]", "[95, 8]"];
        "missing expert": Draft(|draft| draft.reshape(&format!("{EXPERTS}.weight"), "U32", &[3, 64, 4], 4))
            => WrongShape [FILE, "down_proj.weight", "[4, 64, words]"];
        "wrong rows of scales": Draft(|draft| draft.reshape(&format!("{QUERY}.scales"), "BF16", &[127, 2], 2))
            => WrongShape [FILE, "q_proj.scales", "[128, groups]"];
        "biases not of the scales' shape": Draft(|draft| draft.reshape(&format!("{QUERY}.biases"), "BF16", &[128, 1], 2))
            => WrongShape [FILE, "q_proj.biases", "[128, 2]", "[128, 1]"];
        "taps without the last dimension": Draft(|draft| draft.reshape(CONV, "BF16", &[128, 4], 2))
            => WrongShape [FILE, CONV, "[128, 4, 1]"];
        "integer norm": Draft(|draft| draft.reshape(NORM, "I32", &[64], 4)) => WrongType [FILE, NORM, "I32"];
        "float8 matrix": Draft(|draft| {
            draft.reshape("language_model.model.layers.0.mlp.shared_expert_gate.weight", "F8_E4M3", &[1, 64], 1);
        }) => WrongType [FILE, "shared_expert_gate.weight", "F8_E4M3"];
        "codes not U32": Draft(|draft| draft.reshape(EMBEDDING, "I32", &[96, 8], 4)) => WrongType [FILE, EMBEDDING, "U32"];
        "double scales": Draft(|draft| draft.reshape(&format!("{QUERY}.scales"), "F64", &[128, 2], 8))
            => WrongType [FILE, "q_proj.scales", "F64"];
        "biases of another type": Draft(|draft| draft.reshape(&format!("{QUERY}.biases"), "F16", &[128, 2], 2))
            => WrongType [FILE, "q_proj.biases", "BF16", "F16"];
        "seven bits": Draft(|draft| draft.reshape(&format!("{QUERY}.weight"), "U32", &[128, 14], 4))
            => WrongWidth [FILE, "q_proj.weight", "14 words"];
        "no codes": Draft(|draft| draft.reshape(&format!("{QUERY}.weight"), "U32", &[128, 0], 4))
            => WrongWidth [FILE, "q_proj.weight", "0 words"];
        "groups of sixteen": Draft(|draft| {
            draft.reshape(&format!("{QUERY}.scales"), "BF16", &[128, 4], 2);
            draft.reshape(&format!("{QUERY}.biases"), "BF16", &[128, 4], 2);
        }) => WrongWidth [FILE, "q_proj.scales", "4 groups"];
        "no groups": Draft(|draft| {
            draft.reshape(&format!("{QUERY}.scales"), "BF16", &[128, 0], 2);
            draft.reshape(&format!("{QUERY}.biases"), "BF16", &[128, 0], 2);
        }) => WrongWidth [FILE, "q_proj.scales", "0 groups"];
        "groups that do not divide": Draft(|draft| {
            draft.reshape(&format!("{QUERY}.scales"), "BF16", &[128, 3], 2);
            draft.reshape(&format!("{QUERY}.biases"), "BF16", &[128, 3], 2);
        }) => WrongWidth [FILE, "q_proj.scales", "3 groups"];
        "mxfp4": Draft(|draft| draft.reshape(&format!("{QUERY}.scales"), "U8", &[128, 2], 1))
            => UnsupportedQuantization [FILE, "q_proj.scales", "mxfp4", "mlx_lm.convert"];
        "nvfp4": Draft(|draft| {
            draft.reshape(&format!("{QUERY}.scales"), "U8", &[128, 4], 1);
            draft.remove(&format!("{QUERY}.biases"));
        }) => UnsupportedQuantization [FILE, "q_proj.scales", "nvfp4"];
        "mxfp8": Draft(|draft| {
            draft.reshape(&format!("{ROUTER}.scales"), "U8", &[4, 2], 1);
            draft.remove(&format!("{ROUTER}.biases"));
        }) => UnsupportedQuantization [FILE, "mlp.gate.scales", "mxfp8"];
        "a bias that the architecture has not": Draft(|draft| draft.add(&format!("{QUERY}.bias"), &[128]))
            => UnexpectedTensor [FILE, "q_proj.bias"];
        "with and without prefix": Draft(|draft| draft.add("model.norm.weight", &[64]))
            => DuplicateTensor [FILE, "model.norm.weight", NORM];
        "convolution not transposed": Draft(|draft| draft.reshape(CONV, "BF16", &[128, 1, 4], 2))
            => RawLayout [FILE, CONV, "mlx_lm.convert"];
        "vendor's prefix": Draft(|draft| {
            let tensors = &mut draft.shards[0].1;
            for tensor in tensors {
                tensor.name = tensor.name.replace("language_model.model.", "model.language_model.");
            }
        }) => RawLayout [FILE, "model.language_model.", "mlx_lm.convert"];
        "vendor's experts": Draft(|draft| {
            draft.add("language_model.model.layers.0.mlp.experts.gate_up_proj", &[4, 64, 64]);
        }) => RawLayout [FILE, "mlp.experts.gate_up_proj", "mlx_lm.convert"];
    }
}

fn set_shard(draft: &mut Draft, tensor: &str, shard: Value) {
    draft.index.as_mut().unwrap()["weight_map"][tensor] = shard;
}

fn file_defects() -> Vec<Defect> {
    use Damage::{Bytes, Draft, Sharded};
    defects! {
        "no config": Bytes(|files| { files.remove(CONFIG); }) => MissingFile [CONFIG];
        "no weights": Bytes(|files| { files.remove(FILE); }) => MissingFile [FILE, INDEX];
        "config not text": Bytes(|files| files.get_mut(CONFIG).unwrap()[4] = 0xff) => NotText [CONFIG, "4"];
        "config not JSON": Bytes(|files| files.get_mut(CONFIG).unwrap()[0] = b'[') => Json [CONFIG];
        "config a list": Bytes(|files| *files.get_mut(CONFIG).unwrap() = b"[1]".to_vec()) => Json [CONFIG, "a list of 1"];
        "config of 17 MB": Bytes(|files| files.get_mut(CONFIG).unwrap().resize(17 << 20, b' '))
            => FileTooLarge [CONFIG, "16777216"];
        "index not JSON": Bytes(|files| { files.insert(INDEX.into(), b"{".to_vec()); }) => Json [INDEX];
        "index without map": Sharded(|draft| draft.index = Some(json!({}))) => Json [INDEX, "weight_map"];
        "index with an empty map": Sharded(|draft| draft.index = Some(json!({"weight_map": {}}))) => Json [INDEX];
        "shard lost": Sharded(|draft| { draft.shards.pop(); }) => MissingFile [SECOND, INDEX];
        "shard above the directory": Sharded(|draft| set_shard(draft, NORM, json!("../model.safetensors")))
            => Index [INDEX, NORM, "../model.safetensors"];
        "shard with an absolute path": Sharded(|draft| set_shard(draft, NORM, json!("/etc/hostname")))
            => Index [INDEX, NORM, "/etc/hostname"];
        "shard in a folder": Sharded(|draft| set_shard(draft, NORM, json!("a/model.safetensors")))
            => Index [INDEX, NORM, "a/model.safetensors"];
        "shard not a name": Sharded(|draft| set_shard(draft, NORM, json!(7))) => Index [INDEX, NORM, "7"];
        "index names the wrong shard": Sharded(|draft| set_shard(draft, NORM, json!(FIRST))) => Index [INDEX, NORM, FIRST, SECOND];
        "tensor in two shards": Sharded(|draft| {
            let copy = draft.tensor(NORM).clone();
            draft.shards[0].1.push(copy);
        }) => DuplicateTensor [SECOND, NORM, FIRST];
        "tensor lost from its shard": Sharded(|draft| draft.remove(NORM)) => MissingTensor [SECOND, NORM];
        "tensor in neither index nor shard": Sharded(|draft| {
            draft.remove(NORM);
            draft.index.as_mut().unwrap()["weight_map"].as_object_mut().unwrap().remove(NORM);
        }) => MissingTensor [INDEX, NORM];
        "more layers declared than stored": Draft(|draft| {
            draft.text()["num_hidden_layers"] = json!(3);
            draft.text().as_object_mut().unwrap().remove("layer_types");
        }) => MissingTensor [FILE, "language_model.model.layers.2.input_layernorm.weight"];
        "tied embeddings declared, larger vocabulary": Draft(|draft| {
            draft.text()["tie_word_embeddings"] = json!(true);
            draft.text()["vocab_size"] = json!(97);
        }) => WrongShape [FILE, EMBEDDING, "[97, words]"];
    }
}

fn config_defects() -> Vec<Defect> {
    use Damage::{Config, Draft, Text};
    defects! {
        "no architecture": Config("model_type", Value::Null) => UnsupportedArchitecture [CONFIG, "model_type", "none"];
        "another architecture": Config("model_type", json!("qwen3_moe")) => UnsupportedArchitecture [CONFIG, "qwen3_moe"];
        "another text model": Text("model_type", json!("llama")) => UnsupportedArchitecture [CONFIG, "text_config.model_type", "llama"];
        "text_config not a table": Config("text_config", json!(3)) => ConfigField [CONFIG, "text_config"];
        "dense": Text("num_experts", json!(0)) => UnsupportedFeature [CONFIG, "num_experts", "dense"];
        "attention bias": Text("attention_bias", json!(true)) => UnsupportedFeature [CONFIG, "attention_bias"];
        "weights not normalised": Text("norm_topk_prob", json!(false)) => UnsupportedFeature [CONFIG, "norm_topk_prob"];
        "no output gate": Text("attn_output_gate", json!(false)) => UnsupportedFeature [CONFIG, "attn_output_gate"];
        "another activation": Text("hidden_act", json!("gelu")) => UnsupportedFeature [CONFIG, "hidden_act", "gelu"];
        "another output gate": Text("output_gate_type", json!("sigmoid")) => UnsupportedFeature [CONFIG, "output_gate_type"];
        "dense layers": Text("mlp_only_layers", json!([0])) => UnsupportedFeature [CONFIG, "mlp_only_layers"];
        "sparse every other layer": Text("decoder_sparse_step", json!(2)) => UnsupportedFeature [CONFIG, "decoder_sparse_step"];
        "yarn": Draft(|draft| draft.text()["rope_parameters"]["rope_type"] = json!("yarn"))
            => UnsupportedFeature [CONFIG, "rope_parameters.rope_type", "yarn"];
        "yarn under the older name": Draft(|draft| {
            draft.text()["rope_parameters"]["type"] = json!("yarn");
        }) => UnsupportedFeature [CONFIG, "rope_parameters.type", "yarn"];
        "yarn in the older table": Text("rope_scaling", json!({"type": "yarn", "factor": 4}))
            => UnsupportedFeature [CONFIG, "rope_scaling.type", "yarn"];
        "rope for each kind of layer": Text("rope_parameters", json!({"full_attention": {"rope_theta": 1e6}}))
            => UnsupportedFeature [CONFIG, "rope_parameters.full_attention"];
        "rope without a base": Text("rope_parameters", json!({"rope_type": "default"})) => ConfigField [CONFIG, "rope_theta", "none"];
        "rope base zero": Draft(|draft| draft.text()["rope_parameters"]["rope_theta"] = json!(0))
            => ConfigField [CONFIG, "rope_parameters.rope_theta"];
        "odd rotary part": Draft(|draft| draft.text()["rope_parameters"]["partial_rotary_factor"] = json!(0.1))
            => ConfigField [CONFIG, "partial_rotary_factor", "which is 3"];
        "rotary part above one": Draft(|draft| draft.text()["rope_parameters"]["partial_rotary_factor"] = json!(1.5))
            => ConfigField [CONFIG, "partial_rotary_factor", "1.5"];
        "layer types against the interval": Text("layer_types", json!(["full_attention", "full_attention"]))
            => ConfigField [CONFIG, "layer_types[0]", "linear_attention", "full_attention"];
        "layer types too few": Text("layer_types", json!(["linear_attention"])) => ConfigField [CONFIG, "layer_types"];
        "interval zero": Text("full_attention_interval", json!(0)) => ConfigField [CONFIG, "full_attention_interval"];
        "width zero": Text("hidden_size", json!(0)) => ConfigField [CONFIG, "hidden_size"];
        "width beyond all bounds": Text("hidden_size", json!(1u64 << 40)) => ConfigField [CONFIG, "hidden_size", "1099511627776"];
        "width negative": Text("hidden_size", json!(-64)) => ConfigField [CONFIG, "hidden_size", "-64"];
        "width not a number": Text("hidden_size", json!("64")) => ConfigField [CONFIG, "hidden_size", "\"64\""];
        "layers beyond all bounds": Text("num_hidden_layers", json!(100_000)) => ConfigField [CONFIG, "num_hidden_layers"];
        "no expert width": Text("moe_intermediate_size", Value::Null) => ConfigField [CONFIG, "moe_intermediate_size", "none"];
        "more experts picked than there are": Text("num_experts_per_tok", json!(5)) => ConfigField [CONFIG, "num_experts_per_tok", "5"];
        "heads that do not divide": Text("num_key_value_heads", json!(3)) => ConfigField [CONFIG, "num_key_value_heads", "divisor"];
        "linear heads that do not divide": Text("linear_num_key_heads", json!(3)) => ConfigField [CONFIG, "linear_num_key_heads", "divisor"];
        "one tap": Text("linear_conv_kernel_dim", json!(1)) => ConfigField [CONFIG, "linear_conv_kernel_dim"];
        "epsilon zero": Text("rms_norm_eps", json!(0)) => ConfigField [CONFIG, "rms_norm_eps"];
        "end token without a row": Config("eos_token_id", json!([3, 96])) => ConfigField [CONFIG, "eos_token_id", "96"];
        "tied not a flag": Text("tie_word_embeddings", json!(1)) => ConfigField [CONFIG, "tie_word_embeddings"];
        "parameters beyond all bounds": Draft(|draft| {
            for (field, value) in [("num_hidden_layers", 1024), ("num_experts", 4096), ("hidden_size", 1 << 17), ("moe_intermediate_size", 1 << 17)] {
                draft.text()[field] = json!(value);
            }
            draft.text().as_object_mut().unwrap().remove("layer_types");
        }) => ConfigField [CONFIG, "parameters"];
        "projection beyond all bounds": Draft(|draft| {
            draft.text()["num_attention_heads"] = json!(4096);
            draft.text()["head_dim"] = json!(4096);
        }) => ConfigField [CONFIG, "num_attention_heads × head_dim"];
        "mxfp4 declared": Draft(|draft| draft.config["quantization"]["mode"] = json!("mxfp4"))
            => UnsupportedQuantization [CONFIG, "quantization.mode", "mxfp4"];
        "nvfp4 declared for a module": Draft(|draft| {
            draft.config["quantization"]["model.norm"] = json!({"group_size": 64, "bits": 4, "mode": "nvfp4"});
        }) => UnsupportedQuantization [CONFIG, "quantization.model.norm.mode", "nvfp4"];
        "another quantiser": Draft(|draft| {
            draft.config["quantization"] = Value::Null;
            draft.config["quantization_config"] = json!({"quant_method": "fp8"});
        }) => UnsupportedQuantization [CONFIG, "quant_method", "fp8"];
        "seven bits declared": Draft(|draft| draft.config["quantization"]["bits"] = json!(7))
            => ConfigField [CONFIG, "quantization.bits", "7"];
        "no group size declared": Draft(|draft| draft.config["quantization"]["group_size"] = Value::Null)
            => ConfigField [CONFIG, "quantization.group_size", "none"];
    }
}

/// The files of the spoiled checkpoint.
fn spoil(damage: Damage) -> Files {
    let mut single = Draft::single();
    match damage {
        Damage::Draft(change) => change(&mut single),
        Damage::Sharded(change) => {
            single = Draft::sharded();
            change(&mut single);
        }
        Damage::Text(field, value) => single.text()[field] = value,
        Damage::Config(field, value) => single.config[field] = value,
        Damage::Bytes(change) => {
            let mut files = single.files();
            change(&mut files);
            return files;
        }
        Damage::Header(change) => {
            let mut files = single.files();
            edit_header(weights(&mut files), change);
            return files;
        }
    }
    single.files()
}

fn check(defects: Vec<Defect>) {
    for Defect {
        name,
        damage,
        kind,
        mentions,
    } in defects
    {
        let error = open(&spoil(damage)).expect_err(name);
        let message = error.to_string();
        assert!(kind(&error), "{name}: another error: {error:?}");
        for mention in mentions {
            assert!(
                message.contains(mention),
                "{name}: no {mention:?} in: {message}"
            );
        }
        assert!(
            message.len() < 600,
            "{name}: a message of {} bytes",
            message.len()
        );
    }
}

#[test]
fn the_checkpoint_that_is_spoiled_is_good() {
    open(&Draft::single().files()).unwrap();
    open(&Draft::sharded().files()).unwrap();
}

#[test]
fn damaged_headers_are_refused() {
    check(header_defects());
}

#[test]
fn wrong_tensors_are_refused() {
    check(tensor_defects());
}

#[test]
fn missing_and_misplaced_files_are_refused() {
    check(file_defects());
}

#[test]
fn impossible_and_unsupported_configurations_are_refused() {
    check(config_defects());
}

/// Any change of one byte of a header is refused or leaves tensors that fill the file: nothing panics.
#[test]
fn no_change_of_a_header_byte_panics() {
    let good = Draft::single().files().remove(FILE).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut bytes = good.clone();
    let mut refused = 0;
    for at in 0..header {
        for value in *b"\"9}" {
            bytes[at] = value;
            match lily_checkpoint::parse_header(&bytes, bytes.len() as u64, FILE) {
                Ok(head) => {
                    let data: u64 = head.tensors.iter().map(|tensor| tensor.length).sum();
                    assert_eq!(
                        head.bytes + data,
                        bytes.len() as u64,
                        "byte {at} {value:#04x}"
                    );
                }
                Err(error) => {
                    refused += 1;
                    assert!(
                        error.to_string().contains(FILE),
                        "byte {at} {value:#04x}: {error}"
                    );
                }
            }
        }
        bytes[at] = good[at];
    }
    assert!(
        refused > header,
        "most changes are refused: {refused} of {}",
        6 * header
    );
}

/// A pipe would block, a directory cannot be read: both are refused before they are opened.
#[test]
fn a_directory_in_a_files_place_is_refused() {
    let mut files = Draft::single().files();
    files.remove(FILE);
    let directory = common::write(&files);
    std::fs::create_dir(directory.path().join(FILE)).unwrap();
    let error = lily_checkpoint::Checkpoint::open(directory.path()).unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error:?}");
    assert!(
        error.to_string().contains(FILE) && error.to_string().contains("regular"),
        "{error}"
    );
}
