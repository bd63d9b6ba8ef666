#include "store/reuse_hazard.h"

#include <algorithm>

namespace mooncache::store {

namespace {

constexpr double kEndS = 7200.0;
constexpr std::array<double, 5> kGapBeginS = {0, 30, 60, 120, 240};
constexpr double kBasePerKs[kShapes][kBands] = {
    {0.445, 0.551, 0.651, 0.778, 1.104, 1.521, 1.474, 1.177, 0.804, 0.521, 0.361, 0.232, 0.124, 0.099, 0.079,
     0.063},
    {0.808, 1.457, 1.997, 2.701, 3.741, 4.251, 3.3, 2.33, 1.396, 0.818, 0.613, 0.421, 0.243, 0.195, 0.156,
     0.125},
    {0.404, 0.691, 0.921, 1.32, 2.362, 3.549, 3.886, 2.475, 1.304, 0.717, 0.432, 0.254, 0.146, 0.117, 0.094,
     0.075},
    {0.271, 0.447, 0.592, 0.827, 1.544, 2.472, 2.893, 2.364, 1.504, 0.851, 0.49, 0.239, 0.113, 0.09, 0.072,
     0.058},
    {0.275, 0.403, 0.543, 0.758, 1.205, 1.8, 2.247, 2.362, 1.864, 1.26, 0.747, 0.376, 0.168, 0.129, 0.103,
     0.082},
    {0.24, 0.352, 0.455, 0.592, 0.916, 1.35, 1.635, 1.429, 1.197, 1.004, 0.829, 0.569, 0.273, 0.176, 0.14,
     0.112},
};
constexpr std::array<uint64_t, 8> kTurnBegin = {1, 2, 3, 4, 5, 6, 8, 11};
constexpr std::array<int, 8> kTurnScore = {-2, -10, -4, -1, 2, 6, 5, 10};
constexpr std::array<uint64_t, 8> kLengthBegin = {1, 3, 5, 9, 15, 25, 40, 80};
constexpr std::array<int, 8> kLengthScore = {-33, 7, 6, 8, 7, 6, 7, -1};
constexpr std::array<uint64_t, 8> kNewBegin = {0, 2, 3, 5, 9, 15, 25, 40};
constexpr std::array<int, 8> kNewScore = {3, 4, 4, 1, -3, -1, -3, 1};
constexpr double kStep = 1.051;
constexpr std::array<int, kBands> kScoreWeight = {16, 16, 16, 16, 16, 16, 16, 16, 16, 16, 12, 8, 4, 0, 0, 0};
constexpr std::array<double, kSharedClasses> kSharedGapBeginS = {0, 2, 8, 30, 120, kSharedGapMaxS};
constexpr double kSharedFactor = 20.0, kLeftFactor = 0.03, kPartialFactor = 0.03;
constexpr size_t kLate = 11;  // from this band on only the band's own correction counts
constexpr double kEventsBand = 200.0, kEventsBandMin = 1.0, kTrust = 10.0;
constexpr double kEventsGrid = 40.0, kEventsClass = 40.0, kKeep = 0.96;

// How many of the ascending `begins` are not above `value`.
template <typename T, size_t N>
size_t not_above(const std::array<T, N>& begins, T value) {
  return static_cast<size_t>(std::upper_bound(begins.begin(), begins.end(), value) - begins.begin());
}

// Imagined events of the prior's bands: few when what is seen is far from it.
double trust(const std::array<double, kBands>& seen, const std::array<double, kBands>& expected) {
  double excess = 0, weight = 0;
  for (size_t band = 0; band < kBands; ++band) {
    const double difference = seen[band] - expected[band];
    excess += difference * difference - expected[band];
    weight += expected[band] * expected[band];
  }
  if (excess * kEventsBand <= weight * kTrust) return kEventsBand;
  return std::max(weight * kTrust / excess, kEventsBandMin);
}

}  // namespace

size_t class_of(const Signals& signals) {
  const size_t shape = signals.turn <= 1 ? 0 : not_above(kGapBeginS, signals.gap_s);
  const int score = kTurnScore[not_above(kTurnBegin, uint64_t{signals.turn}) - 1] +
                    kLengthScore[not_above(kLengthBegin, signals.blocks) - 1] +
                    kNewScore[not_above(kNewBegin, signals.new_blocks) - 1];
  return shape * kScores + static_cast<size_t>(std::clamp(score, kScoreMin, kScoreMax) - kScoreMin);
}

size_t shared_class(double gap_s) {
  return kSharedClass + not_above(kSharedGapBeginS, gap_s) - 1;
}

size_t band_of(double age_s) {
  return not_above(kBandBeginS, age_s) - 1;
}

Hazard::Hazard()
    : prior_(kBands), events_(kBands, Row{}), exposure_s_(kBands, Row{}), worth_(kBands), rate_(kBands) {
  std::array<double, kScores> factors{};
  constexpr size_t kOne = -kScoreMin;
  factors[kOne] = 1.0;
  for (size_t at = kOne + 1; at < kScores; ++at) factors[at] = factors[at - 1] * kStep;
  for (size_t at = kOne; at-- > 0;) factors[at] = factors[at + 1] / kStep;
  for (size_t band = 0; band < kBands; ++band) {
    Row& row = prior_[band];
    for (size_t klass = 0; klass < kLeftClass; ++klass) {
      const int score = static_cast<int>(klass % kScores) + kScoreMin;
      const int steps = score * kScoreWeight[band] / 16;  // towards 0
      row[klass] =
          kBasePerKs[klass / kScores][band] / 1000.0 * factors[static_cast<size_t>(steps - kScoreMin)];
    }
    const double base = kBasePerKs[0][band] / 1000.0;
    row[kLeftClass] = base * kLeftFactor;
    row[kPartialClass] = base * kPartialFactor;
    std::fill(row.begin() + kSharedClass, row.end(), base * kSharedFactor);
  }
  refresh();
}

void Hazard::sum_by_class(Row& seen, Row& expected) const {
  seen = events_[0];
  for (size_t klass = 0; klass < kClasses; ++klass) expected[klass] = exposure_s_[0][klass] * rate_[0][klass];
  for (size_t band = 1; band < kBands; ++band) {
    for (size_t klass = 0; klass < kClasses; ++klass) {
      seen[klass] += events_[band][klass];
      const double product = exposure_s_[band][klass] * rate_[band][klass];
      expected[klass] += product;
    }
  }
}

void Hazard::correct_grid(bool by_score) {
  Row seen, expected;
  sum_by_class(seen, expected);
  const auto group = [&](size_t klass) { return by_score ? klass % kScores : klass / kScores; };
  std::array<double, std::max(kScores, kShapes)> seen_sum{}, expected_sum{};
  for (size_t klass = 0; klass < kLeftClass; ++klass) {
    seen_sum[group(klass)] += seen[klass];
    expected_sum[group(klass)] += expected[klass];
  }
  for (size_t klass = 0; klass < kLeftClass; ++klass) {
    const size_t at = group(klass);
    const double corrected = (seen_sum[at] + kEventsGrid) / (expected_sum[at] + kEventsGrid);
    for (size_t band = 0; band < kLate; ++band) rate_[band][klass] *= corrected;
  }
}

void Hazard::correct_classes() {
  Row seen, expected;
  sum_by_class(seen, expected);
  for (size_t klass = 0; klass < kClasses; ++klass) {
    const double ratio = (seen[klass] + kEventsClass) / (expected[klass] + kEventsClass);
    const size_t bands = klass < kLeftClass ? kLate : kBands;
    for (size_t band = 0; band < bands; ++band) rate_[band][klass] *= ratio;
  }
}

void Hazard::estimate() {
  rate_ = prior_;
  std::array<double, kBands> seen{}, expected{};
  for (size_t band = 0; band < kBands; ++band) {
    for (size_t klass = 0; klass < kLeftClass; ++klass) {
      seen[band] += events_[band][klass];
      const double product = exposure_s_[band][klass] * rate_[band][klass];
      expected[band] += product;
    }
  }
  const double imagined = trust(seen, expected);
  for (size_t band = 0; band < kBands; ++band) {
    const double corrected = (seen[band] + imagined) / (expected[band] + imagined);
    for (double& value : rate_[band]) value *= corrected;
  }
  correct_grid(true);
  correct_grid(false);
  correct_classes();
}

void Hazard::refresh() {
  estimate();
  for (size_t first = 0; first < kBands; ++first) {
    Row alive, hits{}, seconds{};
    alive.fill(1.0);
    worth_[first].fill(0.0);
    for (size_t band = first; band < kBands; ++band) {
      const double width = (band + 1 < kBands ? kBandBeginS[band + 1] : kEndS) - kBandBeginS[band];
      for (size_t klass = 0; klass < kClasses; ++klass) {
        const double passed = rate_[band][klass] * width;
        const double used = alive[klass] * (passed / (1.0 + passed));
        hits[klass] += used;
        seconds[klass] += used / rate_[band][klass];
        alive[klass] -= used;
        worth_[first][klass] = std::max(worth_[first][klass], hits[klass] / seconds[klass]);
      }
    }
  }
  for (Table* counts : {&events_, &exposure_s_}) {
    for (Row& row : *counts) {
      for (double& value : row) value *= kKeep;
    }
  }
}

double Hazard::worth_of(size_t klass, double age_s) const {
  const size_t band = band_of(age_s);
  const double begin_s = kBandBeginS[band], worth = worth_[band][klass];
  if (band == kBands - 1) return worth * (begin_s / age_s);
  return worth + (worth_[band + 1][klass] - worth) * ((age_s - begin_s) / (kBandBeginS[band + 1] - begin_s));
}

double Hazard::chance_of(size_t klass, double age_s) const {
  double alive = 1.0;
  for (size_t band = band_of(age_s); band < kBands; ++band) {
    const double begin_s = std::max(kBandBeginS[band], age_s);
    const double end_s = band + 1 < kBands ? kBandBeginS[band + 1] : kEndS;
    if (begin_s >= end_s) break;
    const double passed = rate_[band][klass] * (end_s - begin_s);
    const double used = alive * (passed / (1.0 + passed));
    alive -= used;
  }
  return 1.0 - alive;
}

}  // namespace mooncache::store
