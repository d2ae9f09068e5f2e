#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace headroom {

/// Reads a size such as "512MiB", "1.5GB", "6 GiB" or "4096". Units are case-insensitive: B,
/// KB/MB/GB/TB are powers of 1000 and KiB/MiB/GiB/TiB (also K/M/G/T) powers of 1024. A fraction is
/// rounded down to whole bytes. Throws ConfigError, with the offending text, on anything else:
/// empty, negative, not finite, unknown unit, 2^63 bytes or more.
std::int64_t parse_bytes(std::string_view text);

/// Prints a size for people: whole bytes below 1 KiB, then two decimals of KiB, MiB, GiB or TiB.
/// format_bytes(536870912) is "512.00 MiB".
std::string format_bytes(std::int64_t bytes);

}  // namespace headroom
