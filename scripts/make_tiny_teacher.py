"""Makes the teacher of the preset `quickstart_distill`: a decoder a quarter as large as `builtin:tiny` that can add.

    python scripts/make_tiny_teacher.py --out app/model/builtin/tiny_teacher

The teacher is trained like `builtin:tiny` (scripts/make_tiny_model.py), but only on correct answers.
"""

from functools import partial

from scripts.make_tiny_model import CONFIG, NUM_PROBLEMS, main, make_tokenizer, training_rows

SIZES = {"hidden_size": 32, "intermediate_size": 96, "head_dim": 8}
TEACHER_CONFIG = CONFIG | SIZES

if __name__ == "__main__":
    right_only = partial(training_rows, num_problems=NUM_PROBLEMS, right_share=1.0)
    main(TEACHER_CONFIG, make_tokenizer(), right_only, num_steps=4000, num_rows=256)
