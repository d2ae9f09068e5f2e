#include "plan/intervals.h"

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_map>

namespace headroom {
namespace {

std::vector<int> classes_of_stages(const ChainNumbers& n) {
  std::map<std::vector<std::int64_t>, int> known;
  std::vector<int> classes(n.at(n.L));
  for (std::size_t i = 0; i < classes.size(); ++i) {
    std::vector<std::int64_t> key = {n.A[i + 1], n.G[i + 1],          n.oN[i],
                                     n.p[i],     n.F[i + 1] - n.F[i], n.G[i]};
    // The size of the input matters only where it can be stored in several formats.
    if (n.num_formats > 1) key.push_back(n.A[i]);
    key.push_back(n.carried_grad[i]);
    key.push_back(static_cast<std::int64_t>(n.carried[i].size()));
    for (const CarriedBytes& part : n.carried[i])
      key.insert(key.end(), {part.stages_back, part.bytes});
    for (const ChainNumbers::Option& option : n.options[i])
      key.insert(key.end(), {option.S, option.oF, option.oB, option.time_ns});
    classes[i] = known.emplace(std::move(key), static_cast<int>(known.size())).first->second;
  }
  return classes;
}

}  // namespace

ChainNumbers::ChainNumbers(const ChainCosts& chain)
    : L(static_cast<int>(chain.stages.size())),
      num_formats(static_cast<int>(chain.boundary_formats.size()) + 1),
      formats(chain.boundary_formats) {
  const std::size_t num_stages = chain.stages.size(), num_boundaries = num_stages + 1;
  A.assign(num_boundaries, 0);
  G = F = P = A;
  oN.assign(num_stages, 0);
  p = own = carried_grad = oN;
  carried.resize(num_stages);
  G[0] = chain.input_grad_bytes;
  options.resize(num_stages);
  fastest.assign(num_stages, 0);
  for (std::size_t l = 0; l < num_stages; ++l) {
    const StageCosts& stage = chain.stages[l];
    A[l + 1] = own[l] = stage.output_bytes;
    carried[l] = stage.carried;
    for (const CarriedBytes& part : carried[l]) own[l] -= part.bytes;
    carried_grad[l] = stage.carried_grad_bytes;
    G[l + 1] = stage.grad_bytes;
    oN[l] = stage.forward_transient_bytes;
    p[l] = stage.param_grad_bytes;
    F[l + 1] = F[l] + stage.forward_ns;
    P[l + 1] = P[l] + p[l];
    for (const StageOption& option : stage.options) {
      options[l].push_back(option.fits ? Option{option.kept_bytes, option.forward_transient_bytes,
                                                option.backward_transient_bytes,
                                                option.forward_ns + option.backward_ns}
                                       : Option{kMaxChainBytes, 0, 0, kMaxChainNs, false});
    }
    const auto best = std::min_element(
        options[l].begin(), options[l].end(), [](const Option& a, const Option& b) {
          return std::make_pair(a.time_ns, a.S) < std::make_pair(b.time_ns, b.S);
        });
    fastest[l] = static_cast<int>(best - options[l].begin());
  }
  stored.assign(at(num_formats), A);
  encode_ns.assign(at(num_formats), std::vector<std::int64_t>(num_boundaries, 0));
  decode_ns = encode_ns;
  for (std::size_t q = 1; q < at(num_formats); ++q) {
    const BoundaryFormat& format = chain.boundary_formats[q - 1];
    for (std::size_t l = 1; l < num_boundaries; ++l) {
      stored[q][l] = format.stored_bytes(A[l]);
      encode_ns[q][l] = l < chain.stages.size() ? format.encode_ns(A[l], chain.stages[l].forward_ns)
                                                : 0;  // the last boundary is the loss
      // Of the operations that read a boundary, about every other one finds it in memory.
      decode_ns[q][l] = format.decode_ns(A[l]) / (format.decode_overlap > 0 ? 2 : 1);
    }
  }
}

std::int64_t ChainNumbers::keep_need(int first, int last, int format, const Option& option) const {
  const std::int64_t decoded = format == 0 ? 0 : A[at(first)];
  const std::int64_t forward = G[at(last + 1)] + option.oF;
  const std::int64_t backward = G[at(first + 1)] + G[at(first)] - carried_grad[at(first)] +
                                option.oB + P[at(last + 1)] - P[at(first)];
  return decoded + kept(first, format, option) + std::max(forward, backward);
}

Intervals::Intervals(const ChainNumbers& numbers, bool intern, int limit)
    : ids_(slot(0, numbers.L)) {
  const std::vector<int> classes = classes_of_stages(numbers);
  const auto num_classes = static_cast<std::int64_t>(numbers.L) + 1;
  std::unordered_map<std::int64_t, int>
      nodes;  // (name of the prefix, class of the next stage) -> name; the pair itself is the key
  for (int last = 0; last < numbers.L && size() <= limit; ++last) {
    for (int first = last; first >= 0; --first) {
      int name = size();
      if (intern) {
        const std::int64_t prefix = first == last ? 0 : id(first, last - 1) + 1;
        name = nodes.emplace(prefix * num_classes + classes[numbers.at(last)], name).first->second;
      }
      if (name == size()) representatives_.emplace_back(first, last);
      ids_[slot(first, last)] = name;
    }
  }
}

IntervalBounds::IntervalBounds(const ChainNumbers& n, const Intervals& intervals)
    : num_formats(n.num_formats) {
  least_bytes.assign(n.at(intervals.size()) * n.at(num_formats),
                     std::numeric_limits<std::int64_t>::max());
  ample_bytes = least_bytes;
  for (int id = 0; id < intervals.size(); ++id) {
    const auto [first, last] = intervals.representatives()[n.at(id)];
    for (int format = 0; format < num_formats; ++format) {
      if (!n.useful(format, first)) continue;
      std::int64_t least = std::numeric_limits<std::int64_t>::max();
      const int rest = first < last ? intervals.id(first + 1, last) : -1;
      for (const ChainNumbers::Option& option : n.options[n.at(first)]) {
        const std::int64_t after =
            rest < 0 ? 0 : n.kept(first, format, option) + this->least(rest, 0);
        least = std::min(least, std::max(n.keep_need(first, last, format, option), after));
      }
      Sweep sweep(n, first, last, format);
      for (int split = first + 1; split <= last; ++split) {
        sweep.extend_to(split);
        const std::int64_t left = n.P[n.at(last + 1)] - n.P[n.at(split)] +
                                  this->least(intervals.id(first, split - 1), format);
        if (left >= least) continue;
        for (int q = 0; q < num_formats; ++q) {
          if (!n.useful(q, split)) continue;
          const std::int64_t right =
              n.added_as(q, first, format, split - 1) + this->least(intervals.id(split, last), q);
          least = std::min(least, std::max({sweep.need(q), left, right}));
        }
      }
      const ChainNumbers::Option& fastest = n.options[n.at(first)][n.at(n.fastest[n.at(first)])];
      least_bytes[index(id, format)] = least;
      ample_bytes[index(id, format)] =
          std::max(n.keep_need(first, last, format, fastest),
                   rest < 0 ? 0 : n.kept(first, format, fastest) + this->ample(rest, 0));
    }
  }
}

}  // namespace headroom
