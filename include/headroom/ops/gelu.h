#pragma once

namespace headroom {

/// Which Gaussian error linear unit: x Phi(x) itself, or GPT-2's approximation of it by tanh.
enum class GeluKind : int { kExact, kTanh };

}  // namespace headroom
