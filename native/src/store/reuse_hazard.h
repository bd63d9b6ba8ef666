// How likely blocks of a class are used again now, learnt while requests come. The ideas and the numbers are
// described in services/simulate/cache/hazard.py; both compute the same bits: only + - * / and comparisons,
// in the same order. No clock, no randomness, not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace mooncache::store {

inline constexpr size_t kBands = 16;
inline constexpr std::array<double, kBands> kBandBeginS = {0,   8,   12,  18,  27,  40,   60,   90,
                                                           136, 205, 307, 461, 692, 1038, 1557, 2335};
inline constexpr size_t kShapes = 6;
inline constexpr int kScoreMin = -39, kScoreMax = 24;
inline constexpr size_t kScores = kScoreMax - kScoreMin + 1;
inline constexpr size_t kLeftClass = kShapes * kScores;  // left behind by a session that went another way
inline constexpr size_t kPartialClass = kLeftClass + 1;  // unused here: nodes store full blocks only
inline constexpr size_t kSharedClass = kPartialClass + 1;
inline constexpr size_t kSharedClasses = 6;
inline constexpr size_t kClasses = kSharedClass + kSharedClasses;
inline constexpr double kSharedGapMaxS = 480.0;

// What is seen of a chain when it is used.
struct Signals {
  uint32_t turn = 1;  // 1: an unknown session
  double gap_s = 0;   // since the session's last use; 0 at the first
  uint64_t blocks = 0;
  uint64_t new_blocks = 0;
};
size_t class_of(const Signals& signals);
size_t shared_class(double gap_s);
size_t band_of(double age_s);

class Hazard {
 public:
  Hazard();
  // A chain of the class was not used for so long while its age was in the band.
  void waited(size_t klass, size_t band, double seconds) { exposure_s_[band][klass] += seconds; }
  // A chain was used, so many seconds after it came into the band.
  void reused(size_t klass, size_t band, double seconds) {
    exposure_s_[band][klass] += seconds;
    events_[band][klass] += 1.0;
  }
  // Computes worths anew and lets the counts fade.
  void refresh();
  // Hits per second and block of a chain of the class that was used so long ago.
  double worth_of(size_t klass, double age_s) const;
  // That a chain of the class, which was used so long ago, is used again before it is kEndS old.
  double chance_of(size_t klass, double age_s) const;
  uint64_t memory_bytes() const { return 5 * kBands * kClasses * sizeof(double); }

 private:
  using Row = std::array<double, kClasses>;
  using Table = std::vector<Row>;  // [band][class]
  void estimate();
  void correct_grid(bool by_score);
  void correct_classes();
  void sum_by_class(Row& seen, Row& expected) const;

  Table prior_, events_, exposure_s_, worth_;
  Table rate_;  // of the last refresh()
};

}  // namespace mooncache::store
