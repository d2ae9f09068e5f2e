#include "data/text_samples.h"

#include <headroom/data/dataset.h>

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace headroom {
namespace {

using Indices = c10::ArrayRef<std::int64_t>;

at::Tensor make_rows(Indices indices, std::int64_t length, at::ScalarType dtype = at::kLong) {
  return at::empty({static_cast<std::int64_t>(indices.size()), length}, dtype);
}

template <typename Length>
std::int64_t longest(Indices indices, const Length& length) {
  std::int64_t most = 1;
  for (const std::int64_t index : indices) most = std::max(most, length(index));
  return most;
}

class LabelledTexts final : public Dataset {
 public:
  LabelledTexts(TokenLists texts, std::vector<std::int64_t> classes, std::int64_t padding_token,
                bool sees_all_tokens)
      : texts_(std::move(texts)),
        classes_(std::move(classes)),
        padding_token_(padding_token),
        sees_all_tokens_(sees_all_tokens) {}

  std::int64_t size() const override { return texts_.size(); }
  std::int64_t length_of(std::int64_t index) const override { return texts_.length(index); }

  MicroBatch load(Indices indices) const override {
    const auto count = static_cast<std::int64_t>(indices.size());
    const std::int64_t length = longest(indices, [&](auto index) { return texts_.length(index); });
    const at::Tensor tokens = make_rows(indices, length), places = make_rows(indices, 1),
                     classes = at::empty({count}, at::kLong);
    const at::Tensor mask = sees_all_tokens_ ? make_rows(indices, length, at::kBool) : at::Tensor();
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t index = indices[static_cast<std::size_t>(i)], own = texts_.length(index);
      auto* row = tokens.data_ptr<std::int64_t>() + i * length;
      std::copy_n(texts_.tokens(index), own, row);
      std::fill(row + own, row + length, padding_token_);
      if (mask.defined()) {
        auto* seen = mask.data_ptr<bool>() + i * length;
        std::fill(seen, seen + own, true);
        std::fill(seen + own, seen + length, false);
      }
      places.data_ptr<std::int64_t>()[i] = sees_all_tokens_ ? 0 : own - 1;
      classes.data_ptr<std::int64_t>()[i] = classes_[static_cast<std::size_t>(index)];
    }
    MicroBatch batch{{tokens}, {classes, places}, count, count};
    if (mask.defined()) batch.inputs.push_back(mask);
    return batch;
  }

 private:
  TokenLists texts_;
  std::vector<std::int64_t> classes_;
  std::int64_t padding_token_;
  bool sees_all_tokens_;
};

// Inputs from `row` on and the targets one place further on.
void fill_document(const TokenLists& texts, std::int64_t index, std::int64_t* inputs,
                   std::int64_t* targets) {
  const std::int64_t num_inputs = texts.length(index) - 1;
  std::copy_n(texts.tokens(index), num_inputs, inputs);
  std::copy_n(texts.tokens(index) + 1, num_inputs, targets);
}

// Every token but the first of a text is guessed.
std::int64_t sum_of_lengths(const Dataset& data, Indices indices) {
  std::int64_t sum = 0;
  for (const std::int64_t index : indices) sum += data.length_of(index);
  return sum;
}

class Documents final : public Dataset {
 public:
  Documents(TokenLists texts, std::int64_t padding_token)
      : texts_(std::move(texts)), padding_token_(padding_token) {}

  std::int64_t size() const override { return texts_.size(); }
  std::int64_t length_of(std::int64_t index) const override { return texts_.length(index) - 1; }
  std::int64_t count_items(Indices indices) const override {
    return sum_of_lengths(*this, indices);
  }

  MicroBatch load(Indices indices) const override {
    const std::int64_t length = longest(indices, [&](auto index) { return length_of(index); });
    const at::Tensor inputs = make_rows(indices, length), targets = make_rows(indices, length);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const std::int64_t own = length_of(indices[i]), begin = static_cast<std::int64_t>(i) * length;
      auto *in = inputs.data_ptr<std::int64_t>() + begin,
           *out = targets.data_ptr<std::int64_t>() + begin;
      fill_document(texts_, indices[i], in, out);
      std::fill(in + own, in + length, padding_token_);
      std::fill(out + own, out + length, kIgnoreIndex);
    }
    return {{inputs}, {targets}, static_cast<std::int64_t>(indices.size()), count_items(indices)};
  }

 private:
  TokenLists texts_;
  std::int64_t padding_token_;
};

// Texts into rows: each, from the longest on, into the fullest row that has room for it.
std::vector<std::vector<std::int64_t>> pack(const TokenLists& texts, std::int64_t length) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(texts.size()));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
    return texts.length(a) > texts.length(b);
  });
  std::vector<std::vector<std::int64_t>> rows;
  std::multimap<std::int64_t, std::size_t> by_room;
  for (const std::int64_t index : order) {
    const std::int64_t own = texts.length(index) - 1;
    const auto found = by_room.lower_bound(own);
    std::size_t row = rows.size();
    std::int64_t room = length;
    if (found == by_room.end()) {
      rows.emplace_back();
    } else {
      room = found->first;
      row = found->second;
      by_room.erase(found);
    }
    rows[row].push_back(index);
    by_room.emplace(room - own, row);
  }
  return rows;
}

class PackedDocuments final : public Dataset {
 public:
  PackedDocuments(TokenLists texts, std::int64_t length, std::int64_t padding_token)
      : texts_(std::move(texts)), rows_(pack(texts_, length)), padding_token_(padding_token) {}

  std::int64_t size() const override { return static_cast<std::int64_t>(rows_.size()); }
  std::int64_t length_of(std::int64_t index) const override {
    std::int64_t length = 0;
    for (const std::int64_t text : rows_[static_cast<std::size_t>(index)])
      length += texts_.length(text) - 1;
    return length;
  }
  std::int64_t count_items(Indices indices) const override {
    return sum_of_lengths(*this, indices);
  }

  MicroBatch load(Indices indices) const override {
    const std::int64_t length = longest(indices, [&](auto index) { return length_of(index); });
    const at::Tensor inputs = make_rows(indices, length), targets = make_rows(indices, length),
                     starts = make_rows(indices, length, at::kInt),
                     places = make_rows(indices, length);
    for (std::size_t i = 0; i < indices.size(); ++i) {
      const std::int64_t begin = static_cast<std::int64_t>(i) * length;
      auto *in = inputs.data_ptr<std::int64_t>() + begin,
           *out = targets.data_ptr<std::int64_t>() + begin;
      auto* start = starts.data_ptr<std::int32_t>() + begin;
      auto* place = places.data_ptr<std::int64_t>() + begin;
      std::int64_t at = 0;
      for (const std::int64_t text : rows_[static_cast<std::size_t>(indices[i])]) {
        const std::int64_t own = texts_.length(text) - 1;
        fill_document(texts_, text, in + at, out + at);
        std::fill(start + at, start + at + own, static_cast<std::int32_t>(at));
        std::iota(place + at, place + at + own, 0);
        at += own;
      }
      std::fill(in + at, in + length, padding_token_);
      std::fill(out + at, out + length, kIgnoreIndex);
      std::fill(start + at, start + length, static_cast<std::int32_t>(at));
      std::fill(place + at, place + length, 0);
    }
    return {{inputs, starts, places},
            {targets},
            static_cast<std::int64_t>(indices.size()),
            count_items(indices)};
  }

 private:
  TokenLists texts_;
  std::vector<std::vector<std::int64_t>> rows_;
  std::int64_t padding_token_;
};

}  // namespace

std::unique_ptr<Dataset> make_labelled_texts(TokenLists texts, std::vector<std::int64_t> classes,
                                             std::int64_t padding_token, bool sees_all_tokens) {
  return std::make_unique<LabelledTexts>(std::move(texts), std::move(classes), padding_token,
                                         sees_all_tokens);
}

std::unique_ptr<Dataset> make_documents(TokenLists texts, std::int64_t padding_token) {
  return std::make_unique<Documents>(std::move(texts), padding_token);
}

std::unique_ptr<Dataset> make_packed_documents(TokenLists texts, std::int64_t length,
                                               std::int64_t padding_token) {
  return std::make_unique<PackedDocuments>(std::move(texts), length, padding_token);
}

}  // namespace headroom
