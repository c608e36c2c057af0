#pragma once
#include <metal_stdlib>
using namespace metal;

struct Range { uint first, count; };
