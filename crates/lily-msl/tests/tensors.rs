//! Tensor operations: tiles that reach over the edges, an epilogue on a cooperative tensor, and tensors bound
//! as resources.

mod common;

use common::{Format, Random, bytes, bytes_mut, compile};
use lily_msl::{Argument, BuildKind, Launch};

const M: usize = 100;
const N: usize = 70;
const K: usize = 96;

#[test]
fn products_of_tensors() {
    let mut random = Random(3);
    let mut a = Format::Half.encode_all(&random.floats(M * K));
    let mut b = Format::Half.encode_all(&random.floats(N * K));
    let mut bias = vec![0.5_f32; N + 64];
    let value = |bits: u16| f64::from(Format::Half.decode(bits));
    let launch = Launch::new(
        [N.div_ceil(32) as u32, M.div_ceil(64) as u32, 1],
        [128, 1, 1],
    );
    let check = |c: &[f32], b_at: &dyn Fn(usize, usize) -> f64, a: &[u16], offset: f64| {
        for row in 0..M {
            for col in 0..N {
                let terms = (0..K).map(|k| value(a[row * K + k]) * b_at(k, col));
                let expected = terms.sum::<f64>() + offset;
                let error = (expected - f64::from(c[row * N + col])).abs();
                assert!(error < 1e-4, "row {row}, column {col}: off by {error}");
            }
        }
    };
    for build in [BuildKind::Plain, BuildKind::Race] {
        let library = compile(include_str!("kernels/mpp.metal"), "mpp.metal", build);
        let mut c = vec![0.0_f32; M * N];
        let mut arguments = [
            Argument::Buffer(bytes_mut(&mut a)),
            Argument::Buffer(bytes_mut(&mut b)),
            Argument::Buffer(bytes_mut(&mut c)),
            Argument::Buffer(bytes_mut(&mut bias)),
            Argument::Bytes(bytes(&[M as i32, N as i32, K as i32])),
        ];
        if let Err(error) = library.dispatch("mm_tensor", &[], launch, &mut arguments) {
            panic!("{error}");
        }
        check(&c, &|k, col| value(b[col * K + k]), &a, 0.5);

        let mut c = vec![0.0_f32; M * N];
        let tensor = |data, columns: usize, rows: usize| Argument::Tensor {
            data,
            extents: [columns as i32, rows as i32],
        };
        let mut arguments = [
            tensor(bytes_mut(&mut a), K, M),
            tensor(bytes_mut(&mut b), N, K),
            tensor(bytes_mut(&mut c), N, M),
        ];
        if let Err(error) = library.dispatch("mm_handle", &[], launch, &mut arguments) {
            panic!("{error}");
        }
        check(&c, &|k, col| value(b[k * N + col]), &a, 0.0);
    }
}
