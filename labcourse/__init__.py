"""Labs for a course: handing out, collecting and grading the lessons' exercises. It stands on `lessons` and knows no virtual GPU."""
