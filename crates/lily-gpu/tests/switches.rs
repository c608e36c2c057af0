//! Which kernels a plan is recorded with: by switches, by how weights enter a product, and by what multiplies matrices.

use lily_checkpoint::DeclaredModel;
use lily_gpu::record::record;
use lily_gpu::{GpuDescription, MatrixUnits, StateLayout, Switches};
use lily_plan::{ModelDescription, Phase, Plan, PlanClass, PlanOutput, Precision, switches};
use lily_testing::repository;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A chunk of the real model.
fn chunk(precision: Precision) -> Plan {
    let declared = DeclaredModel::read(&repository("fixtures/qwen3.6-35b-a3b")).unwrap();
    let formats = declared.quantization;
    let model = ModelDescription::new(declared.config, |spec| formats.format_of(spec));
    let class = PlanClass {
        phase: Phase::Prefill,
        precision,
        rows: 512,
        context: 262_144,
        output: PlanOutput::LastLogits,
    };
    Plan::record(&Arc::new(model), class)
}

/// The kernels of its products of many rows.
fn kernels(plan: &Plan, matrix_units: MatrixUnits, switches: Switches) -> BTreeSet<&'static str> {
    let gpu = GpuDescription {
        device: "none",
        hardware: "none".into(),
        cores: 40,
        matrix_units,
        matrices: "none".into(),
        reason: String::new(),
    };
    let layout = StateLayout::new(&plan.model.config, plan.class.precision);
    let recording = record(plan, &layout, &switches, &gpu).unwrap();
    let names = recording
        .stages
        .iter()
        .flatten()
        .map(|recorded| recorded.bound.name);
    let products = names.filter(|name| name.contains("project") || name.contains("_experts_"));
    // The head's single row takes vectors always.
    products.filter(|name| *name != "project_1").collect()
}

#[test]
fn tiles_follow_units_and_arithmetic() {
    use MatrixUnits::*;
    let plan = chunk(Precision::Bf16);
    let exact = plan.with_exact_weights();
    let of = |plan: &Plan, units| kernels(plan, units, Switches::default());
    let named = |names: [&'static str; 2]| BTreeSet::from(names);
    let tiles = named(["tile_experts_16", "tile_project_64"]);
    let tensors = named(["tensor_experts_16", "tensor_project_64"]);
    assert_eq!(of(&plan, SimdgroupMatrices), tiles);
    assert_eq!(of(&plan, SixteenBitMatrices), tiles);
    assert_eq!(of(&plan, TensorOperations), tensors);
    assert_eq!(of(&plan, PackedTensorOperations), tensors);
    // Exact weights: as codes where that is possible, else by lanes.
    let packed = named(["packed_experts_16", "packed_project_64"]);
    let lanes = named(["project_8", "project_experts_8"]);
    assert_eq!(of(&exact, PackedTensorOperations), packed);
    assert_eq!(of(&exact, TensorOperations), lanes);
    // At f32 nothing else.
    let plan = chunk(Precision::F32);
    assert_eq!(of(&plan, PackedTensorOperations), lanes);
    assert_eq!(plan.with_exact_weights().steps, plan.steps);
}

#[test]
fn small_tiles_and_dequantised_weights_are_recorded() {
    let plan = chunk(Precision::Bf16);
    let small = Switches {
        small_tiles: true,
        ..Switches::default()
    };
    let units = MatrixUnits::SimdgroupMatrices;
    let expected = BTreeSet::from(["tile_experts_16", "tile_project_16"]);
    assert_eq!(kernels(&plan, units, small), expected);
    let switch = switches::find("fused-dequantisation").expect("a switch");
    let unfused = (switch.without)(&plan);
    assert_eq!(
        kernels(&unfused, units, Switches::default()),
        kernels(&plan, units, Switches::default())
    );
}
