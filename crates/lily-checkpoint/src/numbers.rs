//! Conversions between the stored number formats and f32.

/// The value of a bfloat16: exact, every bfloat16 is an f32.
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The bfloat16 nearest to `value`, ties to even. What exceeds the largest bfloat16 by half a unit or
/// more becomes infinite; a NaN stays a NaN of the same sign.
pub fn f32_to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        // The payload may lie in the low half alone, and dropping it would leave an infinity.
        return (bits >> 16) as u16 | 0x0040;
    }
    // Half a unit less one, plus the unit's own lowest bit: a tie carries only out of an odd number.
    let rounding = 0x7fff + ((bits >> 16) & 1);
    ((bits + rounding) >> 16) as u16
}

/// The value of an IEEE half-precision number: exact, every half is an f32.
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let exponent = u32::from(bits >> 10) & 0x1f;
    let fraction = u32::from(bits) & 0x3ff;
    match exponent {
        // Zero or subnormal: fraction · 2^-24, which an f32 holds exactly as a normal number.
        0 => {
            let magnitude = fraction as f32 * 2.0f32.powi(-24);
            f32::from_bits(magnitude.to_bits() | sign)
        }
        0x1f => f32::from_bits(sign | 0x7f80_0000 | fraction << 13),
        // The exponents are biased by 15 and by 127.
        _ => f32::from_bits(sign | (exponent + 112) << 23 | fraction << 13),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_bf16_survives_the_way_there_and_back() {
        for bits in 0..=u16::MAX {
            let value = bf16_to_f32(bits);
            let back = f32_to_bf16(value);
            if value.is_nan() {
                assert!(bf16_to_f32(back).is_nan(), "{bits:#06x}");
                assert_eq!(back & 0x8000, bits & 0x8000, "{bits:#06x}: the sign");
            } else {
                assert_eq!(back, bits, "{bits:#06x}");
            }
        }
    }

    #[test]
    fn f32_rounds_to_the_nearest_bf16_and_ties_to_even() {
        // Every upper half with the lower halves around the tie, in both signs, judged by distance.
        for upper in 0..0x7f80u32 {
            for lower in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let bits = upper << 16 | lower;
                let down = upper as u16;
                let expected = match lower.cmp(&0x8000) {
                    std::cmp::Ordering::Less => down,
                    std::cmp::Ordering::Greater => down + 1,
                    std::cmp::Ordering::Equal => down + (down & 1),
                };
                assert_eq!(f32_to_bf16(f32::from_bits(bits)), expected, "{bits:#010x}");
                let negative = f32_to_bf16(f32::from_bits(bits | 0x8000_0000));
                assert_eq!(negative, expected | 0x8000, "-{bits:#010x}");
            }
        }
        assert_eq!(
            f32_to_bf16(f32::MAX),
            0x7f80,
            "beyond the largest bfloat16 lies infinity"
        );
        assert_eq!(
            f32_to_bf16(f32::from_bits(0x3f80_8000)),
            0x3f80,
            "a tie above an even number"
        );
        assert_eq!(
            f32_to_bf16(f32::from_bits(0x3f81_8000)),
            0x3f82,
            "a tie above an odd number"
        );
    }

    #[test]
    fn a_nan_is_never_rounded_to_infinity() {
        for bits in [
            0x7f80_0001u32,
            0x7f80_ffff,
            0x7fff_ffff,
            0xff80_0001,
            0xffff_ffff,
        ] {
            let rounded = f32_to_bf16(f32::from_bits(bits));
            assert!(bf16_to_f32(rounded).is_nan(), "{bits:#010x}");
            assert_eq!(
                u32::from(rounded >> 15),
                bits >> 31,
                "{bits:#010x}: the sign"
            );
        }
    }

    #[test]
    fn every_f16_has_the_value_of_its_formula() {
        for bits in 0..=u16::MAX {
            let sign = if bits & 0x8000 == 0 { 1.0f64 } else { -1.0 };
            let exponent = i32::from(bits >> 10 & 0x1f);
            let fraction = f64::from(bits & 0x3ff);
            let found = f16_to_f32(bits);
            let expected = match exponent {
                0 => sign * fraction * 2f64.powi(-24),
                31 if fraction == 0.0 => sign * f64::INFINITY,
                31 => {
                    assert!(found.is_nan(), "{bits:#06x}");
                    continue;
                }
                _ => sign * (1024.0 + fraction) * 2f64.powi(exponent - 25),
            };
            assert_eq!(
                f64::from(found).to_bits(),
                expected.to_bits(),
                "{bits:#06x}"
            );
        }
    }
}
