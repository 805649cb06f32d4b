// Which levels this CPU can run, and the one in use.
#pragma once

#include <string>
#include <vector>

#include "kernels.h"

namespace mlxcel {

const std::vector<const Level*>& levels();  // best first
const Level& level();
bool use_level(const std::string& name);  // false where this CPU has no such level

}  // namespace mlxcel
