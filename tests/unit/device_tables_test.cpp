// The constants of tbq4 that shaders and device code restate, as their files have them, against src/kv's.

#include <gtest/gtest.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "kv/tbq4_constants.hpp"

namespace attnspan {
namespace {

std::string text_of(const std::string& file) {
  std::ifstream stream(std::string(ATTNSPAN_SOURCE_FOLDER) + "/" + file);
  EXPECT_TRUE(stream) << file;
  std::stringstream text;
  text << stream.rdbuf();
  return text.str();
}

// What stands between `begin` and the next `end`.
std::string section(const std::string& file, const std::string& begin, const std::string& end) {
  const std::string text = text_of(file);
  const size_t from = text.find(begin);
  if (from == std::string::npos) {
    ADD_FAILURE() << file << " has no '" << begin << "'";
    return "";
  }
  return text.substr(from + begin.size(), text.find(end, from + begin.size()) - from - begin.size());
}

std::vector<float> decimals(const std::string& text) {
  static const std::regex pattern(R"(-?\d+\.\d+)");
  std::vector<float> values;
  for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i) {
    values.push_back(std::stof(i->str()));
  }
  return values;
}

std::vector<uint32_t> words(const std::string& text) {
  static const std::regex pattern("0x[0-9a-f]{8}");
  std::vector<uint32_t> values;
  for (std::sregex_iterator i(text.begin(), text.end(), pattern), end; i != end; ++i) {
    values.push_back(static_cast<uint32_t>(std::stoul(i->str(), nullptr, 16)));
  }
  return values;
}

const std::vector<float> kAll(tbq4::kCentroids.begin(), tbq4::kCentroids.end());
const std::vector<float> kPositive(tbq4::kPositiveCentroids.begin(), tbq4::kPositiveCentroids.end());

TEST(DeviceTables, CentroidsAreTheFormats) {
  EXPECT_EQ(decimals(section("src/cuda/kv_loader.cuh", "kDeviceCentroids[16] = {", "}")), kAll);
  EXPECT_EQ(decimals(section("src/metal/shaders/element.h", "kCentroids[16] = {", "}")), kAll);
  EXPECT_EQ(decimals(section("src/webgpu/shaders/kv_append.wgsl", "const CENTROIDS =", ";")), kPositive);
  // A tree of selects, smallest first.
  EXPECT_EQ(decimals(section("src/webgpu/shaders/common/codes.wgsl", "fn centroid(", "\n}")), kPositive);
}

TEST(DeviceTables, EncodersRoundAlike) {
  std::vector<float> thresholds(tbq4::kThresholds.begin() + 8, tbq4::kThresholds.end());
  std::vector<float> found =
      decimals(section("src/webgpu/shaders/kv_append.wgsl", "const THRESHOLDS =", ", 1e30"));
  EXPECT_EQ(found, thresholds);
  EXPECT_EQ(decimals(section("src/metal/shaders/append.metal", "kPreScales[9] = {", "}")),
            std::vector<float>(tbq4::kPreScales.begin(), tbq4::kPreScales.end()));
}

TEST(DeviceTables, SignsAreTheFormats) {
  std::vector<uint32_t> signs128, signs64;
  for (const uint64_t bits : tbq4::kSignBits128) {
    signs128.push_back(static_cast<uint32_t>(bits));
    signs128.push_back(static_cast<uint32_t>(bits >> 32));
  }
  signs64 = {static_cast<uint32_t>(tbq4::kSignBits64[0]), static_cast<uint32_t>(tbq4::kSignBits64[0] >> 32)};
  EXPECT_EQ(words(section("src/metal/shaders/rotate.h", "kSigns128[4] = {", "}")), signs128);
  EXPECT_EQ(words(section("src/metal/shaders/rotate.h", "kSigns64[2] = {", "}")), signs64);
  const std::string rotation = "src/webgpu/shaders/common/rotation.wgsl";
  EXPECT_EQ(words(section(rotation, "const SIGNS_128 =", ";")), signs128);
  EXPECT_EQ(words(section(rotation, "const SIGNS_64 =", ";")), signs64);
}

}  // namespace
}  // namespace attnspan
