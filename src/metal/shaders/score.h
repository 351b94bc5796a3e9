#pragma once
// The score transform: s = softcap(softmax_scale * qk) + bias - slope * |i + diagonal - j|, with what its
// derivative needs. The only place that knows softcap, bias and alibi.

#include "span.h"

// What a row brings to its scores.
struct ScoreRow {
  long bias;      // index of its first bias
  long position;  // i + diagonal
  float slope;
};

inline ScoreRow make_score_row(constant AttentionTensors& t, constant AttentionParams& p, Sequence s, int head,
                               int row) {
  ScoreRow r;
  r.bias = s.batch * p.bias_batch + head * p.bias_head + row * p.bias_row;
  r.position = row + s.diagonal;
  r.slope = HAS_ALIBI ? t.alibi_slopes[s.batch * p.alibi_batch + head] : 0.0f;
  return r;
}

struct Score {
  float value;
  float derivative;  // d value / d (softmax_scale * qk)
  bool masked;       // by a bias of -1e30 or less
};

inline Score make_score(constant AttentionTensors& t, constant AttentionParams& p, ScoreRow r, int key, float qk) {
  Score s;
  s.value = qk * p.softmax_scale;
  s.derivative = 1.0f;
  s.masked = false;
  if (HAS_SOFTCAP) {
    const float capped = precise::tanh(s.value / p.softcap);
    s.value = p.softcap * capped;
    s.derivative = 1.0f - capped * capped;
  }
  if (HAS_BIAS) {
    const float bias = t.bias[r.bias + key * p.bias_key];
    s.masked = bias <= -1e30f;
    s.value += s.masked ? 0.0f : bias;  // a bias of -inf takes part in no sum
  }
  if (HAS_ALIBI) s.value -= r.slope * fabs(float(r.position - key));
  return s;
}
