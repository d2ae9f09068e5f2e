#pragma once

#include "config/argument_fields.h"

#include <string>
#include <vector>

namespace headroom::testing {

/// What a flag with a range does not take, besides nothing.
inline std::vector<std::string> refused_values(const ArgumentField& field) {
  std::vector<std::string> values = {
      "x", "nan", "-9223372036854775809", "1e999", "0x10", "1,5", "--", "\xc3\x28", "1\n2"};
  // Sizes may have blanks around them: "1 GiB".
  if (field.name != "memory_budget") values.insert(values.end(), {" 1", "1 "});
  if (field.range != "0 or more") values.emplace_back("18446744073709551616");
  return values;
}

}  // namespace headroom::testing
